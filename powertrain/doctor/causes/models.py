"""Models, tokenizers and trainers of the Hugging Face libraries."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "rope-scaling-old",
        r"`?rope_scaling`? (?:must be a dictionary|should have a 'type' key|'s type field must be)|"
        r"rope_scaling.{0,60}KeyError: 'type'|KeyError: 'rope_type'|Unknown RoPE scaling type",
        "the model's config has a kind of rope_scaling (llama3, yarn, mrope) that the installed "
        "library is too old for",
        "pip install --upgrade transformers (4.43 and newer for Llama 3.1) vllm; one of the same "
        "date as the model",
        "模型配置中的 rope_scaling 类型（llama3、yarn、mrope）所装库太旧不支持",
        "pip install --upgrade transformers（Llama 3.1 需 4.43 以上）vllm",
        "https://github.com/huggingface/transformers/issues/32338",
    ),
    Cause(
        "remote-code-newer-transformers",
        r"'\w*Cache' object has no attribute '(?P<cache>\w+)'|'(?P<model>\w+(?:ForCausalLM|"
        r"ForConditionalGeneration|Model|LMHeadModel|ChatModel|Chat|Decoder|Encoder|"
        r"PreTrainedModel))' object has no attribute '(?P<name>generate|all_tied_weights_keys|"
        r"_supports_\w+|_tp_plan|_extract_past_from_model_output|_prepare_decoder_attention_mask|"
        r"_no_split_modules|is_parallelizable|_set_gradient_checkpointing|_attn_implementation\w*|"
        r"warnings_issued|_init_weights|prepare_inputs_for_generation|_update_causal_mask|"
        r"get_usable_length)'",
        "the model brings its own code (trust_remote_code) or comes from another project, written "
        "for an older transformers than the installed one",
        "the transformers that its page or config.json (transformers_version) names: pip install "
        "transformers==...; a newer revision of the model; transformers' own class without "
        "trust_remote_code",
        "模型自带代码（trust_remote_code）或来自其他项目，面向比所装更旧的 transformers",
        "安装其页面或 config.json（transformers_version）所示的 transformers；模型的新 "
        "revision；或不用 trust_remote_code 的内置类",
        "https://huggingface.co/docs/transformers/models#custom-models",
        confidence="likely",
    ),
    Cause(
        "attention-implementation",
        r"does not support an attention implementation through|does not support Flash ?Attention ?2|"
        r"does not support attention implementation|doesn't support .{0,10}attn_implementation",
        "this model class has no code for the attention that was requested (or is the default)",
        "attn_implementation=\"eager\" in from_pretrained; a newer transformers, where the model may "
        "have it",
        "该模型类没有所要求（或默认）的注意力实现",
        "from_pretrained 中 attn_implementation=\"eager\"；或使用可能已支持的新版 transformers",
        "https://huggingface.co/docs/transformers/attention_interface",
    ),
    Cause(
        "quantized-offload",
        r"Some modules are dispatched on the CPU or the disk|llm_int8_enable_fp32_cpu_offload|"
        r"load_in_8bit_fp32_cpu_offload",
        "the quantized model does not fit the GPU, so that device_map put a part on the CPU, which "
        "quantized layers do not support",
        "free GPU memory or a smaller model; 4 bits instead of 8; device_map={\"\": 0}; "
        "llm_int8_enable_fp32_cpu_offload=True with a device_map of your own",
        "量化模型放不进 GPU，device_map 把一部分放到 CPU，而量化层不支持",
        "释放显存或用更小的模型；4 位代替 8 位；device_map={\"\": "
        "0}；llm_int8_enable_fp32_cpu_offload=True 并自定义 device_map",
        "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    ),
    Cause(
        "meta-left",
        r"is on the meta device, we need a `value`|cannot be called on meta tensors|"
        r"is on device meta|Tensor on device (?:cuda:\d|cpu) is not on the expected device meta",
        "a weight stayed on the meta device: it is not in the checkpoint files, or it is used "
        "before it was loaded (offloading, ZeRO-3, tied weights, an older accelerate)",
        "pip install --upgrade accelerate transformers; low_cpu_mem_usage=False and no device_map; "
        "look for \"newly initialized\" and missing shards",
        "某个权重仍在 meta 设备：检查点中没有，或在加载前被使用（offload、ZeRO-3、共享权重、旧 "
        "accelerate）",
        "pip install --upgrade accelerate transformers；low_cpu_mem_usage=False 且不用 "
        "device_map；检查缺失的分片",
        "https://huggingface.co/docs/accelerate/usage_guides/big_modeling",
        confidence="likely",
    ),
    Cause(
        "quantized-twice",
        r"Blockwise (?:4bit )?quantization only supports 16/32-bit|"
        r"quantized with .{1,40} but you are passing|already (?:been )?quantized",
        "the weights are quantized already, and are quantized again",
        "no load_in_4bit or quantization_config for a model whose config.json has its own; start "
        "from the unquantized weights otherwise",
        "权重已经量化，又被再次量化",
        "config.json 自带量化配置的模型不要再传 load_in_4bit 或 "
        "quantization_config；否则用未量化的权重",
        "https://huggingface.co/docs/transformers/quantization/bitsandbytes",
    ),
    Cause(
        "adapter-files",
        r"Can't find '?adapter_(?:config\.json|model)|adapter_config\.json'? (?:not found|at)",
        "the folder or Hub id is no PEFT adapter: adapter_config.json is not in it (a whole model, "
        "a checkpoint's parent, or an unfinished save)",
        "ls it; give the folder with adapter_config.json and adapter_model.safetensors (often "
        "checkpoint-N); a whole model: from_pretrained without PEFT",
        "该目录或 Hub id 不是 PEFT adapter：缺少 "
        "adapter_config.json（完整模型、检查点的上级目录或未保存完）",
        "检查目录；给出含 adapter_config.json 和 adapter_model.safetensors 的目录（常为 "
        "checkpoint-N）；完整模型不经 PEFT 加载",
        "https://huggingface.co/docs/peft/developer_guides/checkpoint",
    ),
    Cause(
        "generation-length",
        r"Input length of input_ids is \d+, but `max_length`|"
        r"`max_length` .{0,40}is set to \d+\. This can lead to unexpected",
        "the prompt is as long as max_length, which counts the prompt too",
        "max_new_tokens=N instead of max_length; truncate the prompt",
        "提示长度已达 max_length（包含提示）",
        "用 max_new_tokens=N 代替 max_length；截断提示",
        "https://huggingface.co/docs/transformers/main_classes/text_generation",
    ),
    Cause(
        "pad-token",
        r"tokenizer does not have a padding token|if no padding token is defined|"
        r"pad_token_id.{0,40}(?:must be|is not) (?:defined|set)",
        "several sequences are to be padded, and the tokenizer or model has no padding token",
        "tokenizer.pad_token = tokenizer.eos_token; model.config.pad_token_id = "
        "tokenizer.pad_token_id",
        "需要填充多个序列，而分词器或模型没有填充 token",
        "tokenizer.pad_token = tokenizer.eos_token；model.config.pad_token_id = "
        "tokenizer.pad_token_id",
        "https://huggingface.co/docs/transformers/pad_truncation",
    ),
    Cause(
        "chat-template",
        r"tokenizer\.chat_template is not set|default chat template is no longer|"
        r"Conversation roles must alternate|System role not supported|No chat template is",
        "the tokenizer's chat template is missing (a base model) or refuses these messages: its "
        "roles must alternate, or it takes no system role",
        "the instruct model's tokenizer; tokenizer.chat_template = ... or --chat-template FILE; "
        "merge the system message into the first user message",
        "分词器没有 chat template（基础模型），或拒绝这些消息：角色须交替，或不接受 system",
        "使用 instruct 模型的分词器；设置 tokenizer.chat_template 或 --chat-template；把 system "
        "并入第一条 user 消息",
        "https://huggingface.co/docs/transformers/chat_templating",
    ),
    Cause(
        "tokenizer-files",
        r"TypeError: not a string|could not parse ModelProto|ModelProto\.ParseFromArray|"
        r"Unable to load vocabulary from file|sentencepiece_processor\.cc",
        "a tokenizer file is missing, not whole, or only a Git LFS pointer",
        "ls -l the tokenizer.model or vocab files (a pointer has 130 bytes): git lfs pull, or hf "
        "download again; use_fast=True where only tokenizer.json is there",
        "分词器文件缺失、不完整，或只是 Git LFS 指针",
        "ls -l 查看 tokenizer.model 或 vocab 文件（指针约 130 字节）：git lfs pull 或重新 hf "
        "download；只有 tokenizer.json 时 use_fast=True",
        "https://huggingface.co/docs/hub/repositories-getting-started",
        confidence="likely",
    ),
    Cause(
        "tokenizer-class",
        r"Tokenizer class (?P<name>\w+) does not exist",
        "the installed transformers does not know {name}: it is older than the model, or the class "
        "is in the model's own code",
        "pip install --upgrade transformers; trust_remote_code=True after reading the code",
        "所装 transformers 没有 {name}：版本早于模型，或该类在模型自带代码中",
        "pip install --upgrade transformers；阅读代码后 trust_remote_code=True",
        "https://huggingface.co/docs/transformers/troubleshooting",
        confidence="likely",
    ),
    Cause(
        "resume-missing",
        r"No valid checkpoint found in output directory|Can't find a valid checkpoint at",
        "the run should resume from a checkpoint, and that folder has none (or it is not "
        "whole)",
        "ls the folder for checkpoint-N with its weights; leave resume_from_checkpoint out for a "
        "first run; give the path of one checkpoint",
        "要求从检查点继续，而目录中没有（或不完整）",
        "检查目录中的 checkpoint-N 及其权重；首次运行不要 "
        "resume_from_checkpoint；给出具体检查点路径",
        "https://huggingface.co/docs/transformers/trainer",
    ),
    Cause(
        "best-model-settings",
        r"load_best_model_at_end requires|KeyError: 'eval_\w+'|EarlyStoppingCallback requires|"
        r"The `metric_for_best_model` training argument",
        "keeping the best model needs evaluation and saving at the same steps, and a metric that "
        "evaluation returns",
        "eval_strategy and save_strategy alike, save_steps a multiple of eval_steps; "
        "metric_for_best_model one of the keys evaluate() returns; labels in the evaluation set "
        "(label_names)",
        "保留最佳模型需要评估与保存步数一致，且评估返回该指标",
        "eval_strategy 与 save_strategy 相同，save_steps 为 eval_steps "
        "的倍数；metric_for_best_model 为 evaluate() 返回的键；评估集含标签（label_names）",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
    Cause(
        "trainer-columns",
        r"You should supply an encoding or a list of encodings|"
        r"No columns in the dataset match the model's forward|"
        r"num_samples should be a positive integer value, but got num_samples=0|"
        r"KeyError: 'input_ids'|KeyError: 'labels'",
        "the trainer's data set has no column that the model takes (it was not tokenized, or its "
        "columns were removed) or no rows",
        "print(dataset.column_names, len(dataset)); map the tokenizer first; "
        "remove_unused_columns=False with a collator of your own; the field names that the trainer "
        "expects",
        "训练集没有模型需要的列（未分词或被移除），或没有数据行",
        "print(dataset.column_names, len(dataset))；先 map 分词器；自定义 collator 时 "
        "remove_unused_columns=False；使用训练器期望的列名",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
        confidence="likely",
    ),
    Cause(
        "dataset-length",
        r"does not implement __len__, max_steps|max_steps has to be specified|"
        r"object of type '\w*Iterable\w*' has no len\(\)",
        "a streamed data set has no length, so that epochs cannot be counted",
        "max_steps=N in the training arguments; or a data set that is not streamed",
        "流式数据集没有长度，无法计算 epoch",
        "训练参数设 max_steps=N；或不用流式数据集",
        "https://huggingface.co/docs/transformers/main_classes/trainer",
    ),
    Cause(
        "vocabulary-differs",
        r"[Vv]ocab(?:ulary)? size mismatch|[Nn]on-consecutive added token|"
        r"tokenizer size \d+ and vocab size|vocab_size.{0,40}(?:does not match|mismatch|differs)",
        "tokenizer and model have different numbers of tokens: tokens (a pad token) were added to "
        "one only, or the files are of different models",
        "one folder for both; model.resize_token_embeddings(len(tokenizer)); remove the token from "
        "added_tokens.json and tokenizer_config.json where the model has no row for it; pad with "
        "eos",
        "分词器与模型的 token 数不同：只在一方增加了 token（如 pad），或文件来自不同模型",
        "两者用同一目录；model.resize_token_embeddings(len(tokenizer))；模型没有对应行时从 "
        "added_tokens.json 和 tokenizer_config.json 删除该 token；用 eos 填充",
        "https://huggingface.co/docs/transformers/main_classes/tokenizer",
        confidence="likely",
    ),
    Cause(
        "weights-of-another-class",
        r"There is no module or parameter named '?(?P<name>[\w.]+)|not found in params_dict|"
        r"KeyError: '(?:model\.|transformer\.|language_model\.)?layers?\.\d+\.[\w.]+'|"
        r"Following weights were not initialized from checkpoint|Unexpected weight",
        "the checkpoint has weights that the model class of this library does not know, or lacks "
        "some: the library is older than the model, or the files are an adapter, quantized, or of "
        "another architecture",
        "pip install --upgrade vllm transformers (sglang); serve adapters with their base model; "
        "the quantization that config.json names; download the files again",
        "检查点中有该库模型类不认识的权重，或缺少权重：库比模型旧，或文件为 adapter、量化或其他架构",
        "pip install --upgrade vllm transformers（sglang）；adapter 与基础模型一起使用；按 "
        "config.json 的量化方式；重新下载",
        "https://github.com/vllm-project/vllm/issues/21176",
        confidence="likely",
    ),
    Cause(
        "merge-quantized",
        r"Cannot merge LORA layers when|Cannot merge .{0,60}(?:8-bit|4-bit|quantized)",
        "adapters cannot be merged into these quantized weights",
        "load the base model in bf16, then PeftModel.from_pretrained(...).merge_and_unload()",
        "无法把 adapter 合并进量化权重",
        "以 bf16 加载基础模型，再 PeftModel.from_pretrained(...).merge_and_unload()",
        "https://huggingface.co/docs/peft/developer_guides/lora",
    ),
    Cause(
        "onnx-export",
        r"to ONNX opset version '?\d+'? is not supported|Unsupported: ONNX export|ONNX export failed",
        "the exporter has no ONNX form of an operator at this opset",
        "a higher opset_version; torch.onnx.export(dynamo=True); replace the operator (attention: "
        "attn_implementation=\"eager\")",
        "导出器在该 opset 下没有某算子的 ONNX 形式",
        "提高 opset_version；torch.onnx.export(dynamo=T"
        "rue)；替换该算子（注意力：attn_implementation=\"eager\"）",
        "https://docs.pytorch.org/docs/stable/onnx.html",
    ),
)  # fmt: skip
