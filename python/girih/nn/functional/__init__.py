"""Functions that several layers use.

fields        checks and defaults of a configuration's fields, by the library
fused         norms, silu(x) y and unit vectors; one kernel each on a GPU
gates         activations of gates and step sizes
linears       several linear layers of one x, as one operator
rotary        rotary positions
loss          cross entropy of a language model in parts, without all logits at once
step          linear products of a decoding step
state         states of layers between calls
masking       attention masks
packing       sequences packed into one row
chunks        layouts of tokens in whole chunks

These files do not import `girih.nn.layers`, except that `fused` imports `RMSNorm` to compare types.
"""
