"""Modules; `girih.nn` has their public names.

layer               parameters that stay in fp32, parameters that do not decay
sequence_layer      a layer in the place of attention, and how it is called
recurrent_layer     a layer with a state, which skips masked tokens
mixers              the mixers that a configuration can name
block               norm, mixer, norm, feed-forward layer
norm, short_conv, swiglu, decay, projections    parts of layers
mix_attention       two mixers, mixed by a weight

Every other file is a mixer; chunk_attention is attention within CAT's chunks.
"""
