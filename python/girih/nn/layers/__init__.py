"""The modules of `girih.nn`.

layer               the base class: parameters that stay in fp32, parameters without weight decay
sequence_layer      a layer that can replace attention, and its calls
recurrent_layer     a layer with a state that skips masked tokens
mixers              the mixers that a configuration can name
block               norm, mixer, norm, feed-forward layer
norm, short_conv, swiglu, decay, projections    parts of layers
mix_attention       a weighted sum of two mixers

Every other file is a mixer; chunk_attention is the attention of CAT.
"""
