#!/bin/bash
export LIBTPU_INIT_ARGS="--xla_tpu_enable_async_collective_fusion=true"
python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml run_name=mine \
    steps=20 per_device_batch_size=6 remat_policy=full ici_fsdp_parallelism=32 ici_tensor_parallelism=4 \
    max_target_length=4096 global_parameter_scale=16 base_num_decoder_layers=10 compile_topology=v5p-256 attention=flash
