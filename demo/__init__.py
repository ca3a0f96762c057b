"""The embedded model and how it was made: data, tokenizer, training, export, evaluation. Not part of the package."""
