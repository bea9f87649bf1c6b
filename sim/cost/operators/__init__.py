"""The forms of all operators, by name."""

from collections.abc import Mapping

from sim.cost.operators.attention import Decode, Prefill
from sim.cost.operators.base import Form
from sim.cost.operators.gemm import Gemm
from sim.cost.operators.moe import Moe
from sim.cost.operators.other import Collective, Elementwise

FORMS: Mapping[str, Form] = {
    form.op: form for form in (Gemm(), Prefill(), Decode(), Moe(), Collective(), Elementwise())
}

__all__ = ["FORMS", "Form"]
