"""What layers share beside modules.

fields        fields of a configuration, checked and completed by the library
fused         norms, silu(x) y and unit rows; by one kernel each on a GPU
gates         activations of gates and step sizes
linears       linear layers that read the same x, in one operator
rotary        rotary positions
loss          the loss of a language model without all its logits
step          products of a decoding step
state         what a layer carries from one call to the next
masking       masks of tokens
packing       sequences packed into one row
chunks        tokens on whole chunks

These files import none of `girih.nn.layers`, but for `fused`, which knows `RMSNorm` by its type.
"""
