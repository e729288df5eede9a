"""Layers and models of girih as transformers calls them.

attention_call    the call of transformers' attention modules, as the call of a layer
cache_argument    the name of the cache in calls and outputs
"""
