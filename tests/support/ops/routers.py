"""Routers of the model families in plain numpy, and their inputs."""

import numpy as np

from jax_nvfp4_moe.numerics.routing import Router


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def pick(values, ids):
    return np.take_along_axis(values, ids, -1)


def shares(w):
    return w / w.sum(-1, keepdims=True)


def top(values, k):
    return np.argsort(-values, axis=-1, kind="stable")[:, :k]


def qwen3(x, bias):
    s = softmax(x)
    ids = top(s, 4)
    return ids, shares(pick(s, ids))


def unnormalized(x, bias):
    s = softmax(x)
    ids = top(s, 2)
    return ids, pick(s, ids)


def gpt_oss(x, bias):
    ids = top(x, 4)
    return ids, softmax(pick(x, ids))


def deepseek_v3(x, bias):
    """Keep 2 of 4 groups of 4 experts. A group counts as the sum of its two best biased scores."""
    s = sigmoid(x)
    biased = s + bias
    ids, weights = [], []
    for row, scores in zip(biased, s, strict=True):
        groups = row.reshape(4, 4)
        best = np.argsort(-np.sort(groups, axis=-1)[:, -2:].sum(-1), kind="stable")[:2]
        eligible = [e for e in range(16) if e // 4 in best]
        chosen = sorted(eligible, key=lambda e, row=row: (-row[e], e))[:4]
        w = scores[chosen]
        ids.append(chosen)
        weights.append(2.5 * w / w.sum())
    return np.array(ids), np.array(weights)


def kimi_k2(x, bias):
    s = sigmoid(x)
    ids = top(s + bias, 8)
    return ids, 2.827 * shares(pick(s, ids))


def deepseek_v4(x, bias):
    s = np.sqrt(np.log1p(np.exp(x)))
    ids = top(s + bias, 4)
    return ids, shares(pick(s, ids))


def llama4(x, bias):
    ids = top(x, 1)
    return ids, sigmoid(pick(x, ids))


def phimoe(x, bias):
    """Weigh each of two experts against those that are near it, and not the first for the second.

    Near is what `sparsemixer` of `modeling_phimoe` in transformers keeps, with a jitter of 0.15.
    """
    ids, weights = [], []
    for row in x:
        left, chosen, own = list(range(len(row))), [], []
        for _ in range(2):
            best = max(left, key=lambda e, row=row: (row[e], -e))
            factor = np.maximum(np.abs(row), row[best])
            near = [e for e in left if (row[best] - row[e]) / factor[e] <= 0.3]
            own.append(1 / np.exp(row[near] - row[best]).sum())
            chosen.append(best)
            left.remove(best)
        ids.append(chosen)
        weights.append(own)
    return np.array(ids), np.array(weights)


FAMILIES = {
    "qwen3": (qwen3, Router(4), False),
    "unnormalized": (unnormalized, Router(2, renormalize=False), False),
    "gpt_oss": (gpt_oss, Router(4, select="logits"), False),
    "deepseek_v3": (
        deepseek_v3,
        Router(4, score="sigmoid", num_groups=4, groups_kept=2, scaling=2.5),
        True,
    ),
    "kimi_k2": (kimi_k2, Router(8, score="sigmoid", scaling=2.827), True),
    "deepseek_v4": (deepseek_v4, Router(4, score="sqrt_softplus"), True),
    "phimoe": (phimoe, Router(2, select="near", distance=0.3), False),
    "llama4": (llama4, Router(1, score="sigmoid", select="logits", weight_on_input=True), False),
}


def inputs(tokens=200, experts=16):
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((tokens, experts), np.float32)
    return logits, np.float32(0.3) * rng.standard_normal(experts, np.float32)
