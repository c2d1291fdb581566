"""The reference job: train a language model on packed documents, through attnspan's public API alone."""

from attnspan.train.config import TrainConfig as TrainConfig
from attnspan.train.run import resume_config as resume_config
from attnspan.train.run import train as train
