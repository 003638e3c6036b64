from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer


def _shared_loader():
    return None


def llama3_8b_cp() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=2, global_batch_size=32, seq_len=16384, steps=100),
        parallelism=ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2, context_parallel_degree=4),
        activation_checkpoint=FullAC.Config(),
    )
