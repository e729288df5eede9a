"""Adapters from the calling conventions of transformers to those of girih.

attention_call    calls a layer with the arguments of transformers' attention modules
cache_argument    the name of the cache in calls and outputs
"""
