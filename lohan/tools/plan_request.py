"""The request of `lohan plan`: a machine by name and numbers, and settings, as plan options."""

from __future__ import annotations

from dataclasses import replace

from lohan.config import Config
from lohan.errors import ConfigError
from lohan.model.machine import Profile
from lohan.model.options import options_of
from lohan.model.shapes import ModelShape
from lohan.planner import presets
from lohan.planner.machine_plan import PlanRequest
from lohan.util.units import parse_bytes


def machine_of(
    name: str,
    *,
    ssds: int | None,
    gpus: int | None,
    device_memory: str | None = None,
    host: str | None = None,
) -> Profile:
    """Return a preset or the profile in a file; without a name, this machine's latest profile.

    Numbers that are given replace those of the machine.
    """
    if ssds is not None and ssds < 1:
        raise ConfigError(f"--ssds {ssds}: give a whole number from 1")
    if not name:
        from lohan.engine.profile import latest_profile

        latest = latest_profile()
        if latest is None:
            raise ConfigError(
                "--machine: not given, and this machine was not measured yet; run `lohan profile`, "
                f"or choose one of {', '.join(presets.machine_names())}"
            )
        profile = latest
    else:
        profile = presets.machine(name)
    if device_memory is not None:
        if profile.unified:
            raise ConfigError(
                f"--device-memory: {profile.name} has one memory for host and device; use --host"
            )
        size = parse_bytes(device_memory, name="--device-memory")
        profile = replace(profile, device_bytes=size)
    if host is not None:
        profile = profile.with_host(parse_bytes(host, name="--host"))
    if gpus is not None:
        profile = replace(profile, gpus=gpus)
    return profile if ssds is None else profile.with_drives(ssds)


def request_of(model: ModelShape, profile: Profile, settings: Config, minimise: str) -> PlanRequest:
    check_prices(profile, minimise)
    dtype = settings.train.dtype or ("bf16" if profile.has_gpu else "fp32")
    host = settings.budget.host
    profile = profile if host is None else profile.with_host(host)
    return PlanRequest(
        model=model,
        machine=profile,
        options=options_of(settings, dtype=dtype, minimise=minimise),
        batch=settings.train.batch,
        seq=settings.train.seq,
        host=profile.host_bytes,
    )


def check_prices(profile: Profile | None, minimise: str) -> None:
    priced = profile is not None and profile.usd_per_s and profile.usd_per_written_byte
    if minimise == "cost" and not priced:
        name = profile.name if profile is not None else "this machine, which was not measured,"
        raise ConfigError(
            f"--minimise cost: {name} has no prices; give server_usd, and usd and endurance_bytes "
            "of its drives in a TOML file (--machine), or --minimise writes"
        )
