"""Arguments that attention kernels refuse."""

from powertrain.doctor.causes.cause import Cause

_FLASH = "https://github.com/Dao-AILab/flash-attention"

CAUSES = (
    Cause(
        "attention-kv-heads",
        r"[Nn]umber of heads in key/value must divide number of heads in query|"
        r"num(?:ber of)?_?(?:query_)?heads \(?\d* ?\)?must be (?:a multiple of|divisible by) num(?:ber of )?_?(?:kv|"
        r"key_value)_?heads",
        "the heads of the query are no multiple of those of key and value",
        "num_key_value_heads of the config; heads left after tensor parallelism (kv heads must divide by it, or be "
        "repeated)",
        "query 的头数不是 key/value 头数的整数倍",
        "检查配置中的 num_key_value_heads，以及张量并行后的头数",
        _FLASH,
    ),
    Cause(
        "attention-lengths",
        r"cu_seqlens_[qk] must (?:have|be)|batch size must be positive|cu_seqlens\w* (?:should|must)|"
        r"max_seqlen_[qk] must",
        "attention of packed sequences got offsets that do not fit: no sequence at all (an empty batch), another "
        "dtype than int32, or not batch + 1 of them",
        "cu_seqlens: int32, on the GPU, [batch + 1], from 0 to the number of tokens; leave out empty batches",
        "打包序列的注意力得到不合适的偏移：没有序列（空 batch）、不是 int32，或不是 batch + 1 个",
        "cu_seqlens：int32、在 GPU 上、[batch + 1]、从 0 到 token 数；去掉空 batch",
        _FLASH,
    ),
    Cause(
        "packed-out-of-bounds",
        r"an illegal memory access was encountered|device-side assert triggered",
        "a kernel of packed attention read outside of its tensors: cu_seqlens end past the tokens, are not int32 or "
        "on another device, max_seqlen is too small, or indices of unpadding belong to another batch",
        "check on the CPU: cu_seqlens[-1] == q.shape[0], max_seqlen >= the longest, indices < batch * length; dtype "
        "int32; then a newer flash-attn; CUDA_LAUNCH_BLOCKING=1 proves that it is this call and not an earlier one",
        "打包注意力的核函数越界读取：cu_seqlens 超出 token 数、不是 int32 或在其他设备、max_seqlen 太小，"
        "或去填充的下标属于另一 batch",
        "在 CPU 上检查：cu_seqlens[-1] == q.shape[0]、max_seqlen 不小于最长、下标小于 batch * 长度；int32；再升级 "
        "flash-attn；CUDA_LAUNCH_BLOCKING=1 可确认是该调用",
        _FLASH + "/issues/1311",
        confidence="likely",
        derive=lambda groups, excerpt: {}
        if any("varlen" in line or "pad_input" in line or "bert_padding" in line for line in excerpt.above[-8:])
        else None,
    ),
    Cause(
        "attention-last-dim",
        r"[Ii]nput tensor must have contiguous last dimension|must have contiguous last dim|"
        r"(?:query|key|value|q|k|v|dout) (?:tensor )?must (?:be contiguous|have contiguous)",
        "query, key or value was transposed so that the head dim is not the last one in memory",
        ".contiguous() on the tensor before the call; [batch, length, heads, head_dim] for flash-attn",
        "query、key 或 value 被转置，head dim 在内存中不是最后一维",
        "调用前 .contiguous()；flash-attn 的布局为 [batch, length, heads, head_dim]",
        _FLASH,
    ),
    Cause(
        "flash-attention-backward-gpu",
        r"Expected (?:is_sm\w{1,6}|is_sm\w{1,6} \|\| .{1,60}) to be true",
        "this flash-attn has no kernel for this GPU with this head dim: older releases differentiate head dims over 64 "
        "(later over 192) on A100 and H100 only",
        "a newer flash-attn (2.5.5 or later), or attn_implementation=\"sdpa\"; powertrain.attention has no such limit",
        "该 flash-attn 在此 GPU 上没有这个 head dim 的核函数：旧版只在 A100、H100 上支持 head dim 大于 64（后来 192）"
        "的反向",
        "升级 flash-attn（2.5.5 以上），或 attn_implementation=\"sdpa\"；powertrain.attention 没有该限制",
        _FLASH + "/issues/138",
        confidence="likely",
    ),
    Cause(
        "flash-attention-one",
        r"name '(?P<name>flash_attn_\w+|unpad_input|pad_input|index_first_axis|rearrange)' is not defined",
        "{name} was not imported: flash-attn is missing, does not load, or is of a release without it "
        "(flash_attn_varlen_func came with 2.0), and the program passed over the failed import",
        "python -c 'import flash_attn; print(flash_attn.__version__)'; pip install --no-build-isolation "
        "'flash-attn>=2'; attn_implementation=\"sdpa\" goes without",
        "{name} 未被导入：flash-attn 缺失、无法加载，或版本中没有它（flash_attn_varlen_func 自 2.0 起），"
        "程序忽略了导入失败",
        "python -c 'import flash_attn; print(flash_attn.__version__)'；pip install --no-build-isolation "
        "'flash-attn>=2'；或 attn_implementation=\"sdpa\"",
        "https://github.com/imoneoi/openchat/issues/52",
        confidence="likely",
    ),
    Cause(
        "flash-attention-float32",
        r"Flash Attention 2\.0 without specifying a torch dtype|Flash Attention 2(?:\.0)? only supports torch\.float16|"
        r"Flash Attention 2\.0 with a model not initialized on GPU",
        "the model is float32 or on the CPU, and FlashAttention computes in float16 and bfloat16 on a GPU only",
        "from_pretrained(..., dtype=torch.bfloat16) and .to('cuda'), or autocast around the call",
        "模型为 float32 或在 CPU 上，而 FlashAttention 只在 GPU 上以 float16、bfloat16 计算",
        "from_pretrained(..., dtype=torch.bfloat16) 并 .to('cuda')，或使用 autocast",
        "https://huggingface.co/docs/transformers/attention_interface",
    ),
    Cause(
        "padding-side",
        r"batched generation with padding_side='right'|right-padding was detected",
        "a decoder generates after padding: prompts of a batch must be padded on the left",
        "tokenizer.padding_side = 'left' before tokenizing (training keeps 'right'); use_cache=False in training "
        "avoids the check",
        "解码器在填充之后生成：batch 中的提示须左填充",
        "分词前 tokenizer.padding_side = 'left'（训练仍为 right）；训练时 use_cache=False",
        "https://huggingface.co/docs/transformers/llm_tutorial",
    ),
    Cause(
        "fused-loss-no-logits",
        r"'NoneType' object (?:is not subscriptable|has no attribute '(?:float|shape|view|argmax|detach|contiguous|"
        r"size)')",
        "the model returned no logits: a fused linear cross-entropy (Liger) computes the loss without them, and the "
        "trainer reads outputs.logits",
        "a release of the trainer that knows the fused loss (use_liger_kernel=True in its own arguments), or "
        "fused_linear_cross_entropy=False (cross_entropy=True)",
        "模型没有返回 logits：融合的线性交叉熵（Liger）不产生它，而训练器读取 outputs.logits",
        "使用支持融合损失的训练器版本（在其参数中设 use_liger_kernel=True），或 fused_linear_cross_entropy=False",
        "https://github.com/linkedin/Liger-Kernel/issues/568",
        confidence="likely",
        derive=lambda groups, excerpt: {} if any("logits" in line for line in excerpt.above[-3:]) else None,
    ),
)  # fmt: skip
