"""Models: configuration, decoder, weight loading, tokenizer and chat template."""
