"""What every document schema shares: strict keys, frozen values, field types that carry their bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, description="A share between 0 and 1.")]


class Document(BaseModel):
    """Base of every schema: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
