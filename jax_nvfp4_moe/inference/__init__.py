"""Generation, tokenizers, evaluation, export, and balancing of experts over devices."""
