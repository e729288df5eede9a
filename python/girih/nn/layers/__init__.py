"""The modules of `girih.nn`.

layer               the base class: parameters in fp32, parameters without weight decay
sequence_layer      a layer that can replace attention in a model of transformers
recurrent_layer     a layer that reads tokens in order, and only the valid ones
mixers              the mixers that a configuration can name
block               norm, mixer, norm, feed-forward layer
norm, short_conv, swiglu, decay, projections    parts of layers
mix_attention       a weighted sum of two mixers

Every other file is a mixer; chunk_attention is the attention of CAT.
"""
