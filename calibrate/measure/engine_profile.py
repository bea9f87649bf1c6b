"""The real engine's calibration as an entry of a profile, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from calibrate.measure.engine_run import EngineCalibration, MachineState
from sim.cost.measured import StepFit, engine_entry
from sim.cost.models import ModelShape
from sim.cost.profile import Entry, Profile
from sim.errors import UserError


def entry_of(
    calibration: EngineCalibration, model: ModelShape, dtype: str, device: dict[str, Any]
) -> Entry:
    """The `engine` entry of one model."""
    step = calibration.errors["step"]
    return Entry(
        op="engine",
        key={
            "model": model.name,
            "dtype": dtype,
            "kind": device["kind"],
            "machine": asdict(calibration.machine),
        },
        fit=calibration.fit.to_json(),
        points=calibration.steps,
        error={
            "median": 100 * step.median,
            "p90": 100 * step.p90,
            "holdout_median": 100 * step.median,
            "holdout_p90": 100 * step.p90,
        },
        provenance=(
            f"measured here: {calibration.steps} steps of the real engine on {device['device']}, "
            f"{device['date']}, torch {device['torch']}"
        ),
    )


def make_profile(device: dict[str, Any], entries: Sequence[Entry]) -> Profile:
    """A profile of the device that `describe_machine` described."""
    return Profile(
        gpu=device["device"],
        entries=tuple(entries),
        provenance=f"measured here on {device['device']}, {device['date']}",
        created=device["date"],
        meta=device,
    )


def read_engine(profile: Profile, model: ModelShape, device: str) -> tuple[StepFit, MachineState]:
    """The calibration of a model in a profile of this device. UserError for another device's."""
    if profile.gpu != device:
        raise UserError(
            f"the profile is for {profile.gpu}, this machine has {device}; "
            f"calibrate here (leave out --profile)"
        )
    entry = engine_entry(profile, model)
    if entry is None:
        known = ", ".join(sorted({str(e.key.get("model")) for e in profile.of("engine")}))
        raise UserError(
            f"the profile has no measured steps of {model.name} (it has: {known or 'none'}); "
            f"make one with: calibrate run --model {model.name}"
        )
    try:
        machine = MachineState(**entry.key["machine"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"the profile's engine entry of {model.name} was made by another version ({error}); "
            f"make it again with: calibrate run --model {model.name}"
        ) from error
    return StepFit.from_json(entry.fit), machine
