"""Workers that make and read tensors."""

import torch


class Maker:
    def make(self, n: int) -> dict:
        return {"values": torch.full((n,), 3.0), "name": "threes"}


class Reader:
    def total(self, data: dict) -> float:
        data["values"] += 1  # a reader may write to what it got
        return data["values"].sum().item()
