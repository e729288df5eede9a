"""A tokenizer whose tokens are the bytes of a text, for models with 256 tokens."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "\0"  # texts have no zero byte: it ends, begins and pads them


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers whose token ids are the bytes of the text in UTF-8.

    Byte 0 is bos_token, eos_token and pad_token, because texts have none. No token is added to a text.
    `make train` saves the tokenizer with its models. `save_pretrained(folder)` adds it to another folder of a
    model with vocab_size 256.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("Øg")["input_ids"], tokenizer.decode([195, 152, 103])
    ([195, 152, 103], 'Øg')
    """
    # The library writes byte b as the letter chr(b) if that letter is printable, and the other bytes, in
    # order, as letters from chr(256) on.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable, others = {c for c in letters if ord(c) < 256}, iter(c for c in letters if ord(c) >= 256)
    vocabulary = {chr(b) if chr(b) in printable else next(others): b for b in range(256)}
    vocabulary = {END if b == 0 else letter: b for letter, b in vocabulary.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
