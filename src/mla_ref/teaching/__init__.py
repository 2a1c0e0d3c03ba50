"""What the lessons are made of: figures, exercises and their grading, planted bugs, real input."""

from mla_ref.teaching import figures, planted
from mla_ref.teaching.cuda_source import CudaSource, show_cuda
from mla_ref.teaching.exercises import EXERCISES, Exercise
from mla_ref.teaching.grade import Grade, grade
from mla_ref.teaching.real_input import LayerInput, RealModel, layer_input, real_model
from mla_ref.teaching.source import Source, show
from mla_ref.teaching.speak import continue_text

__all__ = [
    "EXERCISES",
    "CudaSource",
    "Exercise",
    "Grade",
    "LayerInput",
    "RealModel",
    "Source",
    "continue_text",
    "figures",
    "grade",
    "layer_input",
    "planted",
    "real_model",
    "show",
    "show_cuda",
]
