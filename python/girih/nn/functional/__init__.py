"""Functions that several layers use.

fields        checks and defaults of configuration fields, computed by the C++ library
fused         norms, silu(x) y and unit vectors; one kernel each on a GPU
gates         activations of gates and step sizes
linears       several linear layers of one input as one operator
rotary        rotary positions
loss          cross entropy of a language model, without the logits of all tokens at once
step          linear layers of a decoding step, with the norm before and the gate after, as one kernel
state         states of layers between calls
masking       attention masks
packing       sequences packed into one row
chunks        layouts of tokens in whole chunks

These files do not import `girih.nn.layers`, except that `fused` imports `RMSNorm` to compare types.
"""
