"""The base class of all sections of a config (frozen, unknown keys are errors), and types of numbers with limits."""

import errno
import os
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]


def _expanded(path: str) -> str:
    # the empty path would be this folder to some readers and nothing to others
    if not path.strip():
        raise PydanticCustomError("no_path", "Input should be a path")
    # no shell has seen a path of a file, and `~` would become the name of a folder
    path = os.path.expanduser(path)
    try:
        os.lstat(path)
    except ValueError:
        raise PydanticCustomError("null_in_path", "Input should be a path without null characters") from None
    except OSError as error:
        # any other error belongs to the code that reads or writes there
        if error.errno == errno.ENAMETOOLONG:
            raise PydanticCustomError(
                "path_too_long", "Input should be a path that the system takes as a name"
            ) from None
        if path.startswith("~"):
            words = "Input should be a path in the home folder of a user that is known here, or begin with ./~"
            raise PydanticCustomError("no_home", words) from None
    return path


def _as_text(path: Any) -> Any:
    # of a config made in Python
    return os.fsdecode(path) if isinstance(path, os.PathLike) else path


FilePath = Annotated[str, BeforeValidator(_as_text), AfterValidator(_expanded)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise PydanticCustomError("not_a_number", "Input should be a number")
        return value


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation is made of: int and NoneType of `int | None`."""
    parts = get_args(annotation)
    return [kind for part in parts for kind in _kinds(part)] if parts else [annotation]
