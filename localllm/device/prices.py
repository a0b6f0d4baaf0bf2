"""Prices of known machines (prices.toml): what a source stated, and when."""

from __future__ import annotations

import tomllib
from pathlib import Path

from localllm.device import parts_table
from localllm.device.synthetic_device import simulate
from localllm.device.types import Device, Price


def prices() -> list[Price]:
    text = Path(__file__).with_name("prices.toml").read_text(encoding="utf-8")
    return [Price(**entry) for entry in tomllib.loads(text)["price"]]


def machines_up_to(usd: float) -> list[tuple[Price, Device]]:
    """Return the machines that cost at most `usd`, cheapest first, with their memory of that
    price."""
    rows = {row.name: row for row in parts_table.rows()}
    priced = []
    for price in sorted(prices(), key=lambda price: (price.usd, price.machine)):
        if price.usd <= usd:
            priced.append((price, simulate(rows[price.machine], price.memory_gb, [])))
    return priced
