NPROC_PER_NODE=8 \
megatron sft \
    --model Qwen/Qwen2.5-14B-Instruct \
    --train_type lora \
    --lora_rank 12 \
    --target_modules linear_qkv linear_proj \
    --tensor_model_parallel_size 4 \
    --sequence_parallel true \
    --micro_batch_size 2 \
    --global_batch_size 32 \
    --packing true \
    --max_length 6144 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1
