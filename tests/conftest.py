"""What every test shares."""

from __future__ import annotations

import torch

# Tests run in one process per core; torch's own threads would only fight each other for them.
torch.set_num_threads(1)
