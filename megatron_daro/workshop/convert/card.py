"""The card of a conversion: every tensor with shape and dtype on both sides, how it changed, and how it was checked.

It is `conversion.json` in the target, and the lines that the command prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.checkpoint_keys import global_boxes, possible_boxes
from megatron_daro.convert.mapping import hf_to_megatron
from megatron_daro.convert.plan import Plan
from megatron_daro.workshop.convert.records import FileRecord, TensorRecord

CARD_FILE = "conversion.json"
_FORMAT = "megatron-daro conversion 1"


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter and the HF tensors that it is made of.

    change: "same bytes", "rows rearranged", "padded", "cast"; check: "read back and compared", or "written" alone.
    """

    megatron: TensorRecord
    hf: tuple[TensorRecord, ...]
    change: str
    check: str


@dataclass(frozen=True, slots=True)
class Card:
    """A conversion that was carried out. ignored: what the source has and the target does not."""

    source: str
    format: str
    num_bytes: int
    rows: tuple[Row, ...]
    ignored: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return it as plain values for JSON."""
        return {"kind": _FORMAT, **asdict(self)}

    def summary(self) -> list[str]:
        """Return a line for each kind of parameter, and for each way in which they were checked."""
        kinds: Counter[str] = Counter()
        for row in self.rows:
            shape = " x ".join(map(str, row.megatron.shape))
            kinds[f"{row.megatron.name.split('[')[0]}: {row.megatron.dtype} {shape}, {row.change}"] += 1
        checks = Counter(row.check for row in self.rows)
        return [
            *(f"  {kind}" + (f" ({count} times)" if count > 1 else "") for kind, count in kinds.items()),
            *(f"{count} of {len(self.rows)} parameters {check}" for check, count in checks.items()),
        ]


def make_card(plan: Plan, records: Iterable[FileRecord], *, verified: Sequence[str]) -> Card:
    """Return the card of a plan whose files are written.

    Args:
        plan: that was carried out. records: of all its files. verified: files that were read again and compared.
    """
    records = list(records)
    known = {tensor.name: (tensor, record.file) for record in records for tensor in (*record.hf, *record.megatron)}
    rules = hf_to_megatron(read_model_shape(plan.config), fused_norms=True)
    rows = []
    for rule, box in zip(rules, global_boxes(rules), strict=True):
        names = [candidate.name for candidate in possible_boxes(box)]
        name = next(name for name in names if name in known)
        megatron, hf = known[name][0], tuple(known[hf_name][0] for hf_name in rule.hf_names)
        files = {known[n][1] for n in (name, *rule.hf_names)}
        check = "read back and compared" if files <= set(verified) else "written"
        rows.append(Row(megatron, hf, _change(megatron, hf), check))
    return Card(str(plan.source), plan.format, plan.num_bytes, tuple(rows), plan.ignored)


def _change(megatron: TensorRecord, hf: tuple[TensorRecord, ...]) -> str:
    if any(tensor.dtype != megatron.dtype for tensor in hf):
        return "cast"
    if len(hf) > 1:
        return "rows rearranged"
    return "same bytes" if megatron.shape == hf[0].shape else "padded"
