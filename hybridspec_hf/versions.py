"""The one supported transformers range, checked at import."""

import transformers
from packaging.version import Version

# 5.24 only: the split forwards mirror this release's modeling code (tests/models/test_fingerprints.py checks them),
# and other releases differ in the cache API that prefill reads
MIN_TRANSFORMERS = "5.24.0"
BELOW_TRANSFORMERS = "5.25"


def check_transformers() -> None:
    """Refuse to import beside a transformers release that this package was not written for.

    Raises:
        ImportError: with the installed and the supported versions.
    """
    installed = Version(transformers.__version__)
    # a development version of the next release counts as that release
    if not Version(MIN_TRANSFORMERS) <= Version(installed.base_version) < Version(BELOW_TRANSFORMERS):
        raise ImportError(
            f"hybridspec_hf supports transformers >={MIN_TRANSFORMERS},<{BELOW_TRANSFORMERS}, found {installed}. "
            f'Install a supported one: pip install "transformers>={MIN_TRANSFORMERS},<{BELOW_TRANSFORMERS}".'
        )
