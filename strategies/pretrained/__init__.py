"""Pretrained models: folders of Hugging Face read into shards, and written from them. Imports module and below."""
