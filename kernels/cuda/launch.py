"""Options of a launch that depend on nothing but the GPU. Does not know: any kernel."""

from collections.abc import Mapping


def pdl_option(pdl: bool) -> Mapping[str, bool]:
    """Programmatic dependent launch, where it is wanted: older Triton versions refuse the option on other GPUs."""
    return {"launch_pdl": True} if pdl else {}
