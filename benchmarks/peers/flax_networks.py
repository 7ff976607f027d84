"""The works' networks as modules of Flax, as its users write them; parameters have the names of `Work.shapes`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import work as w


class DenseNetwork(nn.Module):
    hidden: int
    classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x)


class Convolutional(nn.Module):
    channels: tuple[int, ...]
    hidden: int
    classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = x[..., None]
        for channels in self.channels:
            x = nn.relu(nn.Conv(channels, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x.reshape(len(x), -1))
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(self.hidden)(x)))
        return nn.Dense(self.classes)(x)


class Block(nn.Module):
    width: int
    hidden: int
    heads: int

    @nn.compact
    def __call__(self, h):
        qkv = nn.Dense(3 * self.width)(nn.LayerNorm(epsilon=1e-5)(h))
        q, k, v = (part.reshape(*h.shape[:2], self.heads, -1) for part in jnp.split(qkv, 3, axis=-1))
        causal = nn.make_causal_mask(h[..., 0])
        attended = nn.dot_product_attention(q, k, v, mask=causal).reshape(h.shape)
        h = h + nn.Dense(self.width)(attended)
        up = nn.Dense(self.hidden)(nn.LayerNorm(epsilon=1e-5)(h))
        return h + nn.Dense(self.width)(jax.nn.gelu(up))


class Transformer(nn.Module):
    vocabulary: int
    length: int
    width: int
    hidden: int
    heads: int
    blocks: int

    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(self.vocabulary, self.width)(tokens)
        h = h + nn.Embed(self.length, self.width)(jnp.arange(self.length))
        for _ in range(self.blocks):
            h = Block(self.width, self.hidden, self.heads)(h)
        return nn.Dense(self.vocabulary)(nn.LayerNorm(epsilon=1e-5)(h))


def network(work: w.Work) -> nn.Module:
    """The work's network."""
    if isinstance(work, w.Sequence):
        return Transformer(work.vocabulary, work.length, work.width, work.hidden, work.heads, work.blocks)
    if isinstance(work, w.Femnist):
        return Convolutional(work.channels, work.hidden, work.classes)
    return DenseNetwork(work.hidden, work.classes)
