"""Data: sources, tokenization, and the order of samples in a run; guide: docs/data.md.

corpus.py     text files and folders, jsonl     indexed.py  .bin/.idx files               loader.py   batches for a rank
quickstart.py text that every machine has       samples.py  GPT-NeoX's order of samples   sources.py  config to data
tokenizer.py  text to ids and back              packed.py   tokens and labels of a sample
datasets_library.py  the Hub, parquet, saved folders
encode.py     corpus to .bin/.idx, in parallel  blend.py    GPT-NeoX's blends             workers.py  reading ahead
file_lock.py  work that one process does for all

Nothing but loader.py and sources.py imports torch, so that the processes that tokenize start quickly.
"""
