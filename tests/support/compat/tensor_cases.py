"""Unusual tensors: what models take, return, change in place, and are made of."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from support.compat.tensor_nets import (
    Marked,
    Unusual,
    branch,
    changed_in_place,
    channels_last,
    complex_part,
    conjugated_products,
    convolutions,
    counted,
    flat_weights,
    from_a_buffer,
    gradient_inside,
    input_changed,
    input_changed_late,
    kept_on_the_module,
    made_outside,
    mean_square,
    nested,
    overlapping_input,
    parametrized,
    rows,
    same_input_twice,
    transposed_weight,
    twins_changed,
    wanting_gradients,
    weights_changed,
)

OUTPUTS = [
    Unusual("views of one activation as outputs", lambda n, x: [h := n.body(x), h.view(-1), h[0], h.t()]),
    Unusual(
        "views of one activation beside the loss",
        lambda n, x: [mean_square(h := n.body(x)), h.view(-1), h[1:], h.t()],
        everyday=True,
    ),
    Unusual("an expanded output", lambda n, x: n.body(x).mean(0).expand(7, 16)),
    Unusual("an overlapping output", lambda n, x: n.body(x).view(-1).unfold(0, 8, 2)),
    Unusual("an input as output", lambda n, x: [mean_square(n.body(x)), x, x[2:], x.t()], everyday=True),
    Unusual("a parameter as output", lambda n, x: [mean_square(n.body(x)), n.first.weight]),
    Unusual("a view of a parameter as output", lambda n, x: [n.body(x), n.first.weight.t()[3:]]),
    Unusual("one output twice", lambda n, x: [h := n.body(x), h]),
    Unusual("an intermediate and its loss", lambda n, x: {"loss": mean_square(h := n.body(x)), "h": h}),
    Unusual(
        "integer and boolean outputs",
        lambda n, x: [mean_square(h := n.body(x)), h.argmax(-1), h > 0, (h > 0).sum()],
        everyday=True,
    ),
    Unusual("numbers, None and text as outputs", lambda n, x: [mean_square(n.body(x)), 3, None, "a", 0.5]),
    Unusual("a complex output", lambda n, x: [mean_square(h := n.body(x)), torch.fft.rfft(h)]),
    Unusual("an output without elements", lambda n, x: [mean_square(h := n.body(x)), h[:0]]),
    Unusual("a constant as output", lambda n, x: [mean_square(n.body(x)), torch.arange(3), torch.ones(())]),
]

IN_PLACE = [
    Unusual(
        "an input that carries a gradient, changed in place", input_changed_late, made_outside, everyday=True
    ),
    Unusual("activations changed in place", changed_in_place, everyday=True),
    Unusual("an input changed in place", input_changed, everyday=True),
    Unusual(
        "an input changed in place and returned", lambda n, x: [mean_square(n.body(x.clone())), x.mul_(3)]
    ),
    Unusual("one of two inputs on one storage changed in place", twins_changed, overlapping_input),
    Unusual("an input given twice, changed in place", twins_changed, same_input_twice),
    Unusual(
        "a counter and a buffer put in another's place",
        counted,
        own=lambda: {"steps": torch.zeros((), dtype=torch.long), "mean": torch.zeros(16)},
        everyday=True,
    ),
]

INPUTS = [
    Unusual(
        "a tensor without elements",
        lambda n, x, e: mean_square(n.body(torch.cat([x, e]))),
        lambda: {"x": rows(), "e": rows(0)},
        everyday=True,
    ),
    Unusual("a batch without rows", lambda n, x: n.body(x).sum(), lambda: {"x": rows(0)}),
    Unusual(
        "a scalar tensor",
        lambda n, x, s: mean_square(n.body(x) * s),
        lambda: {"x": rows(), "s": torch.tensor(0.5)},
    ),
    Unusual(
        "numbers, booleans, None and text",
        lambda n, x, f, i, b, none, t: mean_square(
            n.body(x) * f + i if b and none is None else x, x if t == "a" else x * 2
        ),
        lambda: {"x": rows(), "f": 0.5, "i": 3, "b": True, "none": None, "t": "a"},
        everyday=True,
    ),
    Unusual(
        "lists, tuples and dicts",
        lambda n, x: mean_square(n.body(x["a"][0]), x["b"][1]),
        lambda: {"x": {"a": [rows()], "b": (1, rows())}},
    ),
    Unusual(
        "a transposed input",
        lambda n, x: mean_square(n.body(x)),
        lambda: {"x": torch.randn(16, 32).t()},
        everyday=True,
    ),
    Unusual(
        "a strided input", lambda n, x: mean_square(n.body(x)), lambda: {"x": torch.randn(64, 32)[::2, 1::2]}
    ),
    Unusual(
        "an expanded input",
        lambda n, x: mean_square(n.body(x)),
        lambda: {"x": torch.randn(1, 16).expand(32, 16)},
    ),
    Unusual(
        "an overlapping input",
        lambda n, x: mean_square(n.body(x)),
        lambda: {"x": torch.randn(78).unfold(0, 16, 2)},
    ),
    Unusual("two views of one storage", lambda n, x, y: mean_square(n.body(x * y)), overlapping_input),
    Unusual("one tensor given twice", lambda n, x, y: mean_square(n.body(x * y)), same_input_twice),
    Unusual(
        "a conjugated input",
        lambda n, x: mean_square(n.body(x.real + x.imag)),
        lambda: {"x": torch.randn(32, 16, dtype=torch.complex64).conj()},
    ),
    Unusual(
        "an input that wants a gradient",
        lambda n, x: mean_square(n.body(x)),
        lambda: {"x": rows().requires_grad_()},
        everyday=True,
    ),
    Unusual(
        "a view that wants a gradient",
        lambda n, x, base: mean_square(n.body(x)),
        wanting_gradients,
        everyday=True,
    ),
    Unusual(
        "an input in another precision",
        lambda n, x: mean_square(n.body(x.float())),
        lambda: {"x": rows().double()},
    ),
]

PARAMETERS = [
    Unusual(
        "a transposed weight", lambda n, x: mean_square(n.body(x)), change=transposed_weight, everyday=True
    ),
    Unusual(
        "weights that are views of one storage", lambda n, x: mean_square(n.body(x)), change=flat_weights
    ),
    Unusual(
        "an expanded parameter",
        lambda n, x: mean_square(n.body(x) * n.gain),
        own=lambda: {"gain": nn.Parameter(torch.ones(1).expand(16))},
        learns=False,
    ),
    Unusual(
        "a scalar parameter",
        lambda n, x: mean_square(n.body(x) * n.gain),
        own=lambda: {"gain": nn.Parameter(torch.ones(()))},
    ),
    Unusual(
        "a parameter without elements",
        lambda n, x: mean_square(torch.cat([n.body(x), n.none])),
        own=lambda: {"none": nn.Parameter(torch.zeros(0, 16))},
    ),
    Unusual(
        "a channels-last model and input",
        channels_last,
        lambda: {"x": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)},
        convolutions,
        lambda m: m.to(memory_format=torch.channels_last),
        everyday=True,
    ),
    Unusual(
        "a channels-last input alone",
        channels_last,
        lambda: {"x": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)},
        convolutions,
    ),
    Unusual(
        "sparse gradients of an embedding",
        lambda n, x: mean_square(n.body(n.table(x))),
        lambda: {"x": torch.randint(0, 50, (32,))},
        lambda: {"table": nn.Embedding(50, 16, sparse=True)},
        everyday=True,
    ),
]

DTYPES = [
    Unusual(
        f"a model in {name}",
        lambda n, x: mean_square(n.body(x).float()),
        lambda d=dtype: {"x": rows().to(d)},
        change=lambda m, d=dtype: m.to(d),
        reference=reference,
    )
    for name, dtype, reference in (
        ("float64", torch.float64, "eager"),
        ("float16", torch.float16, "joint"),
        ("bfloat16", torch.bfloat16, "joint"),
    )
] + [
    Unusual(
        "complex numbers inside a real model",
        complex_part,
        own=lambda: {"angle": nn.Parameter(torch.rand(9) * math.pi)},
        everyday=True,
    ),
    Unusual(
        "products of conjugated activations",
        conjugated_products,
        own=lambda: {"turn": nn.Parameter(torch.randn(32, 32, dtype=torch.complex64))},
        everyday=True,
    ),
    Unusual(
        "a complex weight",
        lambda n, x: (torch.complex(h := n.body(x), h) @ n.mix).abs().pow(2).mean(),
        own=lambda: {"mix": nn.Parameter(torch.randn(16, 4, dtype=torch.complex64))},
    ),
]

MORE = [
    Unusual(
        "an input of a tensor subclass",
        lambda n, x: mean_square(n.body(x)),
        lambda: {"x": rows().as_subclass(Marked)},
    ),
    Unusual(
        "an input of a wrapper subclass",
        lambda n, x: mean_square(n.body(x)),
        lambda: {"x": TwoTensor(rows(), rows())},
    ),
    Unusual(
        "a parameter of a wrapper subclass",
        lambda n, x: mean_square(n.body(x) * n.gain),
        own=lambda: {"gain": nn.Parameter(TwoTensor(torch.ones(16), torch.ones(16)))},
    ),
    Unusual(
        "a gradient by torch.func.grad inside",
        lambda n, x: mean_square(n.body(x), torch.func.grad(lambda y: n.body(y).pow(2).sum())(x)),
    ),
    Unusual("a nested tensor (jagged)", nested),
    Unusual(
        "an embedding with sparse gradients, read twice",
        lambda n, x: mean_square(n.body(n.table(x) + n.table(x.flip(0)))),
        lambda: {"x": torch.randint(0, 50, (32,))},
        lambda: {"table": nn.Embedding(50, 16, sparse=True)},
    ),
    Unusual(
        "a bag of embeddings with sparse gradients",
        lambda n, x: mean_square(n.body(n.table(x))),
        lambda: {"x": torch.randint(0, 50, (32, 3))},
        lambda: {"table": nn.EmbeddingBag(50, 16, sparse=True)},
    ),
    Unusual("activations and a second loss kept on the module", kept_on_the_module),
    Unusual("a buffer filled, then read", from_a_buffer, own=lambda: {"mean": torch.ones(16)}),
    Unusual("a weight changed in place by the forward", weights_changed),
    Unusual("spectral and weight normalization", lambda n, x: mean_square(n.body(x)), change=parametrized),
    Unusual(
        "torch.func.vmap inside",
        lambda n, x: torch.func.vmap(lambda r: n.body(r).pow(2).sum(), randomness="different")(x).mean(),
    ),
    Unusual(
        "overlapping views by as_strided",
        lambda n, x: mean_square(torch.as_strided(n.body(x), (8, 8), (3, 1))),
    ),
    Unusual(
        "bilinear upsampling",
        lambda n, x: mean_square(
            functional.interpolate(n.body(x)[None, None], scale_factor=2, mode="bilinear")
        ),
        reference="joint",
    ),
]

GROUPS = {
    "output": OUTPUTS,
    "in place": IN_PLACE,
    "input": INPUTS,
    "parameter": PARAMETERS,
    "dtype": DTYPES,
    "more": MORE,
}

REFUSED = [
    Unusual(
        "a sparse input",
        lambda n, x, s: mean_square(n.body(torch.sparse.mm(s, x))),
        lambda: {"x": rows(), "s": torch.eye(32).to_sparse()},
        refused="sparse",
        in_several=True,
        remark="torch.compile takes none; make it sparse inside the model, or multiply outside",
    ),
    Unusual(
        "a padding index in an embedding with sparse gradients",
        lambda n, x: mean_square(n.body(n.table(x))),
        lambda: {"x": torch.randint(0, 50, (32,))},
        lambda: {"table": nn.Embedding(50, 16, sparse=True, padding_idx=1)},
        refused="data-dependent",
        in_several=True,
        remark="the number of its gradient's rows depends on the data",
    ),
    Unusual(
        "a shape that depends on the data",
        lambda n, x: mean_square(n.body(x)[x[:, 0] > 0]),
        refused="depends on the data",
        in_several=True,
        remark="x[mask], nonzero, unique: use torch.where or a product with the mask",
    ),
    Unusual("torch.cond", branch, refused="chooses by the data", remark="its memory depends on the data"),
    Unusual(
        "torch.autograd.grad inside",
        gradient_inside,
        refused="autograd.grad|requires_grad_",  # torch 2.11 stops at the latter, which comes before
        remark="torch.func.grad works",
    ),
]
