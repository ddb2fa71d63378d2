"""FP8 training for Hugging Face Trainer, Accelerate, PEFT and TRL."""

import logging as _logging

from hf_fp8.arguments import FP8ArgumentsMixin, FP8TrainingArguments
from hf_fp8.callbacks import ThroughputCallback
from hf_fp8.config import FP8Config
from hf_fp8.export import ExportReport, export_fp8
from hf_fp8.grad_unroll import unroll_gradients
from hf_fp8.layout import quantize_weights, rollout_layout
from hf_fp8.linear import revert
from hf_fp8.plugin import FP8Plugin
from hf_fp8.report import ConversionReport
from hf_fp8.streaming import iter_full_weights
from hf_fp8.trainer import FP8Trainer, FP8TrainerMixin

__version__ = "0.1.0"
__all__ = [
    "ConversionReport",
    "ExportReport",
    "FP8ArgumentsMixin",
    "FP8Config",
    "FP8Plugin",
    "FP8Trainer",
    "FP8TrainerMixin",
    "FP8TrainingArguments",
    "ThroughputCallback",
    "export_fp8",
    "iter_full_weights",
    "quantize_weights",
    "revert",
    "rollout_layout",
    "unroll_gradients",
]

# The report must be seen without any logging set-up, like the messages of transformers.
_logger = _logging.getLogger(__name__)
if not _logger.handlers:
    _logger.addHandler(_logging.StreamHandler())
    _logger.setLevel(_logging.INFO)
    _logger.propagate = False
