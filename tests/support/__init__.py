"""What tests share: fakes, made models and tokenizers, processes and their clients."""
