"""Every key that a GPT-NeoX YAML may have: its type and its disposition.

Read from GPT-NeoX's megatron/neox_arguments/neox_args.py and deepspeed_args.py, up to 2026 (Apache-2.0; facts, no
code), with keys of older releases that configs still carry. Translations by a key's value are in neox.py, neox_data.py
and neox_model.py.
"""

from dataclasses import dataclass
from typing import Literal

KeyDisposition = Literal["honoured", "mapped", "ignored", "refused"]


@dataclass(frozen=True)
class Key:
    """kind: type of the value, alternatives apart by "|"; refused: advice for a value that switches it on."""

    kind: str
    disposition: KeyDisposition
    words: str


# key, kind, our key
_HONOURED = """
    num_layers                      int         model.num_layers
    hidden_size                     int         model.hidden_size
    num_attention_heads             int         model.num_heads
    num_kv_heads                    int         model.num_kv_heads
    seq_length                      int         train.seq_length
    max_position_embeddings         int         model.max_position_embeddings
    norm                            str         model.norm
    layernorm_epsilon               float       model.norm_eps, where norm is layernorm
    rms_norm_epsilon                float       model.norm_eps, where norm is rmsnorm
    use_bias_in_norms               bool        model.norm_bias
    use_bias_in_attn_linear         bool        model.attention_bias
    use_bias_in_mlp                 bool        model.mlp_bias
    activation                      str         model.activation
    pos_emb                         str         model.position_embedding
    rotary_pct                      float       model.rotary_pct
    rotary_emb_base                 float       model.rope_theta
    gpt_j_residual                  bool        model.parallel_residual
    gpt_j_tied                      bool        model.shared_norm
    init_method                     str         model.init_method
    output_layer_init_method        str         model.output_init_method
    init_method_std                 float       model.init_std
    hidden_dropout                  float       model.hidden_dropout
    attention_dropout               float       model.attention_dropout
    make_vocab_size_divisible_by    int         model.vocab_size and data.vocab_multiple
    padded_vocab_size               int         model.vocab_size
    optimizer                       dict        optimizer
    weight_decay                    float       optimizer.weight_decay: not on norms and biases, as there
    gradient_clipping               float       train.gradient_clipping: the global L2 norm; left out: no clipping
    min_lr                          float       schedule.min_lr
    lr_decay_style                  str         schedule.kind
    lr_decay_iters                  int         schedule.decay_steps
    lr_decay_fraction               float       schedule.decay_steps
    train_batch_size                int         train.micro_batch_size * gradient_accumulation_steps * ranks
    train_micro_batch_size_per_gpu  int         train.micro_batch_size
    gradient_accumulation_steps     int         train.gradient_accumulation_steps
    train_iters                     int         train.steps
    exit_interval                   int         train.exit_interval
    precision                       str         train.precision
    fp16                            dict|bool   train.precision and train.loss_scale
    bf16                            dict|bool   train.precision
    data_path                       str         data.train, divided by data.split
    train_data_paths                list        data.train
    valid_data_paths                list        data.validation
    test_data_paths                 list        data.test
    train_label_data_paths          list        data.train, labels
    valid_label_data_paths          list        data.validation, labels
    test_label_data_paths           list        data.test, labels
    train_data_weights              list        data.train, weight
    valid_data_weights              list        data.validation, weight
    test_data_weights               list        data.test, weight
    weight_by_num_documents         bool        data.weight_by_num_documents
    weighted_sampler_alpha          float       data.weighted_sampler_alpha
    split                           str         data.split
    num_workers                     int         data.num_workers
    eod_mask_loss                   bool        data.eod_mask_loss
    save                            str         checkpoint.folder
    load                            str         checkpoint.load: continues at its step; an empty path starts a new run
    finetune                        bool        checkpoint.finetune
    no_load_optim                   bool        checkpoint.load_optimizer, inverted
    no_load_rng                     bool        checkpoint.load_rng, inverted: dropout draws other values
    use_checkpoint_lr_scheduler     bool        checkpoint.load_schedule
    override_lr_scheduler           bool        the config's schedule, at the checkpoint's step; here always
    checkpoint_factor               int|float   checkpoint.every
    save_interval                   int|float   checkpoint.every: the name of older releases
    gas                             int         train.gradient_accumulation_steps: the name of older releases
    checkpoint_scale                str         checkpoint.scale
    extra_save_iters                list        checkpoint.extra_steps
    keep_last_n_checkpoints         int         checkpoint.keep_last
    eval_interval                   int         evaluation.every
    eval_iters                      int         evaluation.steps: times gradient_accumulation_steps
    log_interval                    int         logging.every
    peak_theoretical_tflops         float       logging.peak_tflops
    lr_clamp                        str         schedule.clamp (ours: safe; neox, neox-2023, neox-2022)
"""

# key, kind, translation
_MAPPED = """
    pipe_parallel_size              int         parallel.pipeline; 0 and 1 train the same
    model_parallel_size             int         parallel.tensor
    sequence_parallel               bool        on with parallel.tensor, whatever its value (docs/overlap.md)
    output_layer_parallelism        str         column: the head is sharded over parallel.tensor
    zero_optimization               dict        parallel.strategy
    intermediate_size               int         model.intermediate_size
    expansion_factor                float       model.intermediate_size
    mlp_multiple_of                 int         model.intermediate_size, rounded up to it
    mlp_type                        str         regular: model.activation says the kind of MLP; llama: a gated one
    no_weight_tying                 bool        model.tie_embeddings, inverted
    sliding_window_width            int         model.sliding_window, which counts the query's own position: one more
    attention_config                list        model.layer_types; for flash and global powertrain.attention chooses
    gmlp_attn_dim                   int         model.gmlp_attention_dim, of amlp layers
    warmup                          float       schedule.warmup_steps: the fraction of lr_decay_iters
    checkpoint_activations          bool        train.activation_checkpointing: full
    tokenizer_type                  str         data.tokenizer
    vocab_file                      str         data.tokenizer
    merge_file                      str         data.tokenizer
    data_impl                       str         .bin/.idx files are memory-mapped
    log_dir                         str         logging.folder
    tensorboard_dir                 str         logging.folder, where TensorBoard's events are
    use_wandb                       bool        logging.wandb
    wandb_project                   str         logging.wandb.project
    wandb_group                     str         logging.wandb.group
    wandb_team                      str         logging.wandb.entity
    wandb_run_name                  str         logging.wandb.name
    wall_clock_breakdown            bool        logging.phase_timers
    distributed_backend             str         NCCL between GPUs, gloo between CPUs: by device, not by key
    fp32_allreduce                  bool        train.reduce_dtype
    communication_data_type         str         train.reduce_dtype
    data_types                      dict        gradients accumulate in fp32
    scaled_upper_triang_masked_softmax_fusion  bool  powertrain.attention, fused whatever the flag; nothing is built
    scaled_masked_softmax_fusion    bool        powertrain.attention, fused whatever the flag; nothing is built
    bias_gelu_fusion                bool        powertrain.activation
    bias_dropout_fusion             bool        powertrain.bias_dropout_add, fused whatever the flag
    rope_fusion                     bool        powertrain.rope_qkv, fused whatever the flag; nothing is built
    layernorm_fusion                bool        powertrain.layer_norm, fused whatever the flag
    rmsnorm_fusion                  bool        powertrain.rms_norm, fused whatever the flag
    use_flashattn_swiglu            bool        powertrain.gated_activation, fused whatever the flag
    attention_softmax_in_fp32       bool        attention's softmax is in fp32 whatever the flag
    apply_query_key_layer_scaling   bool        divides, then multiplies by the layer's number: no effect in fp32
    te_columnparallel               bool        linear layers are PyTorch's or ours: same result, no TransformerEngine
    te_rowparallel                  bool        linear layers are PyTorch's or ours: same result, no TransformerEngine
    te_layernorm_mlp                bool        TransformerEngine's MLP (tanh GELU, whole width, biases) by our kernels
    te_fp8_mha                      bool        fp8 of the attention's projections; attention itself in 16 bits
    te_fp8_format                   str         fp8.format, with te_fp8_mha
    te_fp8_wgrad                    bool        weight gradients are FP8 products, with te_fp8_mha
    te_fp8_amax_history_len         int         fp8.history, with te_fp8_mha
    te_fp8_amax_compute_algo        str         fp8.most_recent, with te_fp8_mha
    te_fp8_margin                   int         fp8.margin, with te_fp8_mha
    te_mha                          bool        powertrain.attention: same result, no TransformerEngine
    deepspeed_mpi                   bool        ranks are read from torchrun, srun or mpiexec, whichever started them
    deepspeed_slurm                 bool        ranks are read from torchrun, srun or mpiexec, whichever started them
    deepspeed_extra_args            dict        its keys count as if they stood outside it
    train_reward_data_paths         list        data.train, rewards
    valid_reward_data_paths         list        data.validation, rewards
    test_reward_data_paths          list        data.test, rewards
    pos_train_data_paths            list        data.train
    neg_train_data_paths            list        data.train, rejected
    pos_train_label_data_paths      list        data.train, labels
    neg_train_label_data_paths      list        data.train, rejected_labels
    pos_valid_data_paths            list        data.validation
    neg_valid_data_paths            list        data.validation, rejected
    pos_valid_label_data_paths      list        data.validation, labels
    neg_valid_label_data_paths      list        data.validation, rejected_labels
    pos_test_data_paths             list        data.test
    neg_test_data_paths             list        data.test, rejected
    pos_test_label_data_paths       list        data.test, labels
    neg_test_label_data_paths       list        data.test, rejected_labels
    dpo_beta                        float       train.preference.beta
    dpo_reference_free              bool        train.preference.reference_free
    kto_beta                        float       train.kto.beta
    kto_desirable_weight            float       train.kto.desirable_weight
    kto_undesirable_weight          float       train.kto.undesirable_weight
"""

# key, kind, why
_IGNORED = """
    dpo_fp32                        bool        log-probabilities are computed in float32 whatever the flag
    kto_fp32                        bool        log-probabilities are computed in float32 whatever the flag
    deepspeed                       bool        DeepSpeed is not used: FSDP2 and DDP are PyTorch's
    scheduler                       dict        GPT-NeoX hands DeepSpeed its own scheduler, made of lr_decay_style
    lr                              float       GPT-NeoX overwrites it with optimizer.params.lr
    optimizer_type                  str         GPT-NeoX overwrites it with optimizer.type
    zero_allow_untested_optimizer   bool        a check of DeepSpeed's; every optimizer here is tested with FSDP2
    clip_grad                       float       GPT-NeoX overwrites it with gradient_clipping
    batch_size                      int         GPT-NeoX overwrites it with train_micro_batch_size_per_gpu
    zero_stage                      int|list|str  GPT-NeoX overwrites it with zero_optimization.stage
    zero_reduce_scatter             bool        GPT-NeoX overwrites it from zero_optimization
    zero_contiguous_gradients       bool        GPT-NeoX overwrites it from zero_optimization
    zero_reduce_bucket_size         int         GPT-NeoX overwrites it from zero_optimization
    zero_allgather_bucket_size      int         GPT-NeoX overwrites it from zero_optimization
    dynamic_loss_scale              bool        GPT-NeoX hands DeepSpeed the fp16 section
    loss_scale                      float       GPT-NeoX hands DeepSpeed the fp16 section: fp16.loss_scale
    loss_scale_window               float       GPT-NeoX hands DeepSpeed the fp16 section: fp16.loss_scale_window
    hysteresis                      int         GPT-NeoX hands DeepSpeed the fp16 section: fp16.hysteresis
    min_scale                       float       GPT-NeoX hands DeepSpeed the fp16 section: fp16.min_loss_scale
    prescale_gradients              bool        gradients are averaged in train.reduce_dtype; fp32 does not overflow
    gradient_predivide_factor       float       gradients are averaged in train.reduce_dtype; fp32 does not overflow
    sparse_gradients                bool        a way to send the embedding's gradient; the result is the same
    steps_per_print                 int         DeepSpeed's own printing; log_interval says how often we print
    dump_state                      bool        DeepSpeed's own printing
    flops_profiler                  dict        model FLOPs and MFU are always reported
    autotuning                      dict        DeepSpeed's search for settings; `powertrain lint` estimates memory
    autotuning_run                  str         DeepSpeed's search for settings; `powertrain lint` estimates memory
    activation_checkpointing        dict        checkpoint_activations and checkpoint_num_layers decide
    tensorboard                     dict        DeepSpeed's monitor; tensorboard_dir is read
    wandb                           dict        DeepSpeed's monitor; use_wandb and wandb_project are read
    csv_monitor                     dict        DeepSpeed's monitor; metrics.jsonl is always written
    comms_logger                    dict        DeepSpeed's log of collectives; logging.phase_timers shows their time
    checkpoint                      dict        DeepSpeed's options; save, load and checkpoint_factor are read
    load_universal                  bool        checkpoints here can always be loaded on another number of ranks
    hostfile                        str         hosts are torchrun's or srun's business
    include                         str         hosts are torchrun's or srun's business
    exclude                         str         hosts are torchrun's or srun's business
    num_nodes                       int         hosts are torchrun's or srun's business
    num_gpus                        int         GPUs are torchrun's or srun's business
    master_port                     int         torchrun's --master-port, or MASTER_PORT
    master_addr                     str         torchrun's --master-addr, or MASTER_ADDR
    launcher                        str         torchrun, srun and mpiexec are recognised
    force_multi                     bool        an option of DeepSpeed's launcher
    detect_nvlink_pairs             bool        an option of DeepSpeed's launcher; NCCL finds NVLink
    no_ssh_check                    bool        an option of DeepSpeed's launcher; ssh is not used
    comment                         str         an option of DeepSpeed's launcher
    account                         str         an option of DeepSpeed's launcher
    pipe_partition_method           str         layers are divided so that the slowest stage is as fast as it can be
    world_size                      int         set by GPT-NeoX's launcher, not by users; torchrun says it here
    global_num_gpus                 int         set by GPT-NeoX's launcher, not by users; torchrun says it here
    is_pipe_parallel                bool        set by GPT-NeoX, not by users
    expert_interval                 int         there are no experts (moe_num_experts)
    use_cpu_initialization          bool        weights are drawn from a seed and their name, whatever the device
    fused_kernels_build_path        str         nothing is built with nvcc
    rotary_save_freqs_buffer        bool        rotary tables are computed, never saved
    sparsity_config                 dict        of sparse attention, which no layer has (attention_config)
    rpe_num_buckets                 int         of pos_emb rpe
    rpe_max_distance                int         of pos_emb rpe
    scalenorm_epsilon               float       of norm scalenorm
    param_sharing_style             str         layers share no parameters (num_unique_layers)
    dim_att                         int         of rwkv layers, which there are none of (attention_config)
    head_size                       int         of rwkv layers, which there are none of (attention_config)
    ffn_dim                         int         of rwkv layers, which there are none of (attention_config)
    mamba_selective_scan_fusion     bool        of mamba layers, which there are none of (attention_config)
    mamba_causal_conv_fusion        bool        of mamba layers, which there are none of (attention_config)
    mamba_inner_func_fusion         bool        of mamba layers, which there are none of (attention_config)
    mamba_selective_fp32_params     bool        of mamba layers, which there are none of (attention_config)
    mamba_use_bias_in_conv          bool        of mamba layers, which there are none of (attention_config)
    mamba_use_bias_in_linears       bool        of mamba layers, which there are none of (attention_config)
    wandb_host                      str         WANDB_BASE_URL, which wandb itself reads
    wandb_init_all_ranks            bool        rank 0 speaks for all
    use_comet                       bool        TensorBoard, metrics.jsonl, report.html and W&B are written
    comet_workspace                 str         Comet is not written
    comet_project                   str         Comet is not written
    comet_experiment_name           str         Comet is not written
    comet_tags                      list        Comet is not written
    comet_others                    dict        Comet is not written
    comet_experiment                str         set by GPT-NeoX, not by users
    git_hash                        str         set by GPT-NeoX, not by users
    log_grad_norm                   bool        the gradient's norm is always logged
    log_grad_pct_zeros              bool        logged by GPT-NeoX only; no effect on training
    log_param_norm                  bool        logged by GPT-NeoX only; no effect on training
    log_optimizer_states            bool        logged by GPT-NeoX only; no effect on training
    log_gradient_noise_scale        bool        logged by GPT-NeoX only; no effect on training
    gradient_noise_scale_n_batches  int         logged by GPT-NeoX only; no effect on training
    gradient_noise_scale_cpu_offload  bool      logged by GPT-NeoX only; no effect on training
    memory_profiling                bool        train.profile of ours writes the allocator's snapshots; no effect here
    memory_profiling_path           str         train.profile of ours writes the allocator's snapshots; no effect here
    profile                         bool        train.profile of ours traces steps; no effect on training
    profile_step_start              int         train.profile of ours traces steps; no effect on training
    profile_step_stop               int         train.profile of ours traces steps; no effect on training
    profile_backward                bool        train.profile of ours traces steps; no effect on training
    local_rank                      int         set by GPT-NeoX's launcher, not by users
    rank                            int         set by GPT-NeoX's launcher, not by users
    lazy_mpu_init                   bool        of an external DDP; no effect here
    short_seq_prob                  float       read by no data set of GPT-NeoX
    adlr_autoresume                 bool        of one cluster's scheduler; every start resumes from the last checkpoint
    adlr_autoresume_interval        int         of one cluster's scheduler; every start resumes from the last checkpoint
    onnx_safe                       bool        of ONNX export, which training does not do
    deepscale                       bool        of old DeepSpeed
    deepscale_config                str         of old DeepSpeed
    user_script                     str         set by GPT-NeoX's launcher, not by users
    iteration                       int         set by GPT-NeoX, not by users
    do_train                        bool|int    set by GPT-NeoX, not by users
    do_valid                        bool|int    set by GPT-NeoX, not by users
    do_test                         bool|int    set by GPT-NeoX, not by users
    save_iters                      int|list|str    set by GPT-NeoX, not by users
    config_files                    dict        set by GPT-NeoX, not by users
    curriculum_seqlen               int         set by GPT-NeoX, not by users
    use_shared_fs                   bool        index caches are written once whichever rank comes first
    mmap_warmup                     bool        pages are read when used
    s3_path                         str         checkpoints stay in `save`; copy them from there
    s3_chunk_size                   int         checkpoints stay in `save`; copy them from there
    checkpoint_validation_with_forward_pass  bool  no logits are kept with a checkpoint
    no_save_optim                   bool        the optimizer's state is always saved
    no_save_rng                     bool        random states are always saved
    deepspeed_activation_checkpointing  bool    deprecated in GPT-NeoX too
    contiguous_checkpointing        bool        storage of checkpointed activations, not their values
    checkpoint_in_cpu               bool        storage of checkpointed activations, not their values
    checkpoint_num_layers           int         every layer is checkpointed by itself; the result is the same
    partition_activations           bool        storage of checkpointed activations, not their values
    synchronize_each_layer          bool        a debugging aid; no effect on the result
    char_level_ppl                  bool        logged by GPT-NeoX only; no effect on training
    fp32_reinforce                  bool        log-probabilities are in fp32 whatever it says
    online_dataserver_ips           str|list    of dataset_impl online
    online_dataserver_ports         int|list    of dataset_impl online
    weight_server_port              int|list    of serve_model_weights
    z_loss                          float       GPT-NeoX applies it to reward models only; train.z_loss is ours
    base_shapes_file                str         of use_mup
    mup_init_scale                  float       of use_mup
    mup_attn_temp                   float       of use_mup
    mup_output_temp                 float       of use_mup
    mup_embedding_mult              float       of use_mup
    mup_rp_embedding_mult           float       of use_mup
    mup_width_scale                 int         of use_mup
    text_gen_type                   str         of generation: powertrain generate takes options
    precompute_model_name           str         of generation: powertrain generate takes options
    temperature                     float       of generation: powertrain generate --temperature
    top_p                           float       of generation: powertrain generate --top-p
    top_k                           int         of generation: powertrain generate --top-k
    return_logits                   bool        of generation: powertrain generate takes options
    maximum_tokens                  int         of generation: powertrain generate takes options
    prompt_end                      str         of generation: powertrain generate takes options
    sample_input_file               str         of generation: powertrain generate takes options
    sample_output_file              str         of generation: powertrain generate takes options
    num_samples                     int         of generation: powertrain generate takes options
    recompute                       bool        of generation: powertrain generate takes options
    eval_results_prefix             str         of GPT-NeoX's evaluation harness; powertrain evaluate --output
    eval_task_limit                 int         of GPT-NeoX's evaluation harness; evaluation.task_limit is ours
    moe_top_k                       int         there are no experts (moe_num_experts)
    moe_router_type                 str         there are no experts (moe_num_experts)
    moe_expert_interval             int         there are no experts (moe_num_experts)
    moe_loss_coeff                  float       there are no experts (moe_num_experts)
    moe_aux_loss_coeff              float       there are no experts (moe_num_experts)
    moe_z_loss_coeff                float       there are no experts (moe_num_experts)
    moe_train_capacity_factor       float       there are no experts (moe_num_experts)
    moe_eval_capacity_factor        float       there are no experts (moe_num_experts)
    moe_min_capacity                int         there are no experts (moe_num_experts)
    moe_token_dropping              bool        there are no experts (moe_num_experts)
    moe_use_residual                bool        there are no experts (moe_num_experts)
    moe_expert_parallel_size        int         there are no experts (moe_num_experts)
    moe_type                        str         there are no experts (moe_num_experts)
    moe_glu                         bool        there are no experts (moe_num_experts)
    moe_lbl_in_fp32                 bool        there are no experts (moe_num_experts)
    moe_jitter_eps                  float       there are no experts (moe_num_experts)
    create_moe_param_group          bool        there are no experts (moe_num_experts)
    enable_expert_tensor_parallelism  bool      there are no experts (moe_num_experts)
    use_tutel                       bool        there are no experts (moe_num_experts)
"""

# key, kind, advice; null, false, 0 and empty are fine
_REFUSED = """
    use_qk_layernorm                bool        set it to false; model.architecture llama has RMSNorm there (qk_norm)
    opt_pos_emb_offset              int         set it to 0; OPT's shifted positions are not there
    soft_prompt_tuning              dict        remove it; all parameters are trained
    use_mup                         bool        set it to false and give every width its own lr
    coord_check                     bool        set it to false; there is no muP
    save_base_shapes                bool        set it to false; there is no muP
    amp                             dict        use fp16 or bf16, whose fp32 master weights do the same
    sparse_attention                dict        use sliding_window_width, or [["global"], N] in attention_config
    curriculum_learning             dict        train with one seq_length after the other, each from the last checkpoint
    data_efficiency                 dict        remove it; batches are GPT-NeoX's plain ones
    compression_training            dict        remove it; nothing is pruned or quantized in training
    elasticity                      dict        remove it; torchrun restarts ranks, train_batch_size stays as written
    train_epochs                    int         give train_iters
    serve_model_weights             bool        set it to false; no sampler is served
"""

# read by config/neox.py value by value; only some values are supported
_CHOSEN = """
    eval_tasks                      list        evaluation.tasks, by lm_eval (pip install 'powertrain[evaluate]')
    use_bnb_optimizer               bool        optimizer.kind: adamw8bit, by torchao
    num_unique_layers               int         every layer has its own parameters
    moe_num_experts                 int         model.num_experts; 1: no experts
    train_impl                      str         train.objective; reinforce: policy, with rewards of files
    kl_impl                         str         train.policy.kl: mse is k2, kl is k1; full is not there
    kl_div_beta                     float       train.policy.kl_weight
    reinforce_leave_one_out         bool        false: rewards are advantages as they are in the files
    dataset_impl                    str         gpt2: plain token documents; pairwise: of dpo and rm; not online
    pack_impl                       str         data.packing
    allow_chopped                   bool        data.allow_chopped, where samples are whole documents
    fp16_lm_cross_entropy           bool        the loss is computed in fp32
    seed                            int         train.seed
"""


def _rows(disposition: KeyDisposition, table: str) -> dict[str, Key]:
    rows = (line.split(maxsplit=2) for line in table.splitlines() if line.strip())
    return {key: Key(kind, disposition, words) for key, kind, words in rows}


KEYS: dict[str, Key] = {
    **_rows("honoured", _HONOURED + _CHOSEN),
    **_rows("mapped", _MAPPED),
    **_rows("ignored", _IGNORED),
    **_rows("refused", _REFUSED),
}
