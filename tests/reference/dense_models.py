"""Tiny configurations of dense models."""

from tests.reference.architecture import Architecture, dense

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

DENSE_MODELS = {
    "llama": Architecture(
        "llama", dense(intermediate_size=96, rope_parameters=LLAMA3, rms_norm_eps=1e-5)
    ),
    "mistral": Architecture("mistral", dense(intermediate_size=96, head_dim=32, sliding_window=8)),
    "qwen2": Architecture(
        "qwen2",
        dense(
            intermediate_size=96,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": Architecture("qwen3", dense(intermediate_size=96, head_dim=32)),
}
