"""Shapes, dtypes and values of tensors, and losses."""

from powertrain.doctor.causes.cause import Cause

CAUSES = (
    Cause(
        "loss-targets",
        r"Expected input batch_size|target tensor expected, multi-target|"
        r"Expected floating point type for target|"
        r"Target size \(torch\.Size.{1,60}must be the same as input size|"
        r"only batches of spatial targets|Using a target size .{1,60}different to the input size",
        "the labels have another shape or dtype than this loss takes",
        "cross entropy: logits [N, classes] and int64 class numbers [N] (flatten the sequence: "
        "logits.view(-1, V), labels.view(-1)); BCE and MSE: floats of the output's shape (squeeze, "
        ".float()); num_labels",
        "标签的形状或类型与该损失不符",
        "交叉熵：logits [N, 类别数]、int64 类别 [N]（展平：logits.view(-1, "
        "V)、labels.view(-1)）；BCE、MSE：与输出同形状的浮点数（squeeze、.float()）；num_labels",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
    ),
    Cause(
        "label-range",
        r"IndexError: Target -?\d+ is out of bounds|Assertion `t >= 0 && t < n_classes|"
        r"cur_target >= 0 && cur_target < n_classes",
        "a label is not in [0, number of classes): the head has fewer outputs than there are "
        "classes or tokens, labels start at 1, or -1 is not the ignore_index",
        "labels.unique() beside the last layer's size; num_labels of the model; "
        "resize_token_embeddings(len(tokenizer)); -100 for what is left out",
        "标签不在 [0, 类别数) 内：输出数少于类别或 token 数、标签从 1 开始，或 -1 不是 ignore_index",
        "比较 labels.unique() 与最后一层大小；模型的 "
        "num_labels；resize_token_embeddings(len(tokenizer))；忽略项用 -100",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html",
    ),
    Cause(
        "matrix-sizes",
        r"mat1 and mat2 shapes cannot be multiplied \((?P<left>\d+x\d+) and (?P<right>\d+x\d+)\)|"
        r"size mismatch, m1: \[(?P<m1>[\dx ]+)\], m2: \[(?P<m2>[\dx ]+)\]",
        "a layer got {left}{m1} and has a weight {right}{m2}: its input has another last size than "
        "the layer was made for (hidden size, flattened image, concatenated features, packed 4-bit "
        "weights)",
        "print(x.shape) before that layer, and make its in_features that size; a model part of one "
        "checkpoint and config; 4-bit weights only through their own layer",
        "某层的输入为 {left}{m1}，权重为 {right}{m2}：输入最后一维与层不符（hidden "
        "size、展平的图像、拼接的特征、打包的 4 位权重）",
        "在该层之前 print(x.shape)，并使 in_features 与之相同；模型各部分来自同一检查点与配置；4 "
        "位权重只能经其自己的层使用",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Linear.html",
        confidence="likely",
    ),
    Cause(
        "not-contiguous",
        r"view size is not compatible with input tensor's size and stride",
        "view() on a tensor that is not contiguous (transposed, sliced, channels last)",
        ".reshape(...) or .contiguous().view(...) on that line; on MPS and with channels last too",
        "对非连续张量（转置、切片、channels last）调用 view()",
        "该行改用 .reshape(...) 或 .contiguous().view(...)",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.view.html",
    ),
    Cause(
        "channels",
        r"Given groups=\d+, weight of size .{1,60}to have (?P<want>\d+) channels, but got (?P<got>\d+)",
        "the convolution needs {want} channels and the input has {got}: grey or RGBA images, "
        "channels last, or latents of another model",
        "image.convert(\"RGB\"); x.permute(0, 3, 1, 2); in_channels of the model, or the VAE and the "
        "model of one family",
        "卷积需要 {want} 个通道，输入有 {got} 个：灰度或 RGBA 图像、通道在最后，或另一模型的 latent",
        "image.convert(\"RGB\")；x.permute(0, 3, 1, 2)；模型的 in_channels，或同一系列的 VAE 与模型",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Conv2d.html",
    ),
    Cause(
        "batch-of-one",
        r"Expected more than 1 value per channel when training",
        "batch normalization got a batch of one: the last batch of an epoch, or one sample per GPU",
        "drop_last=True in the DataLoader; a larger batch per GPU; SyncBatchNorm; model.eval() "
        "where nothing is trained",
        "批归一化得到只有一个样本的 batch：epoch 的最后一批，或每个 GPU 一个样本",
        "DataLoader 用 drop_last=True；增大每 GPU 的 batch；SyncBatchNorm；不训练时 model.eval()",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.BatchNorm1d.html",
    ),
    Cause(
        "scatter-dtype",
        r"Index put requires the source and destination dtypes match|"
        r"scatter\(\): Expected self\.dtype to be equal to src\.dtype|Found dtype \w+ but expected|"
        r"index_add_?\(\): self .{0,40}dtype|masked_scatter: expected self and source",
        "a tensor is written into one of another dtype: autocast gave one side another (embeddings "
        "of images into those of text, a loss in fp32 into fp16)",
        "cast the source: .to(target.dtype); one dtype for all parts of the model; labels of MSE "
        "as .float(); leave out the manual .half() under autocast",
        "把张量写入另一 dtype 的张量：autocast 使一侧类型不同（图像 embedding 写入文本 "
        "embedding、fp32 损失写入 fp16）",
        "转换来源：.to(target.dtype)；模型各部分同一 dtype；MSE 的标签用 .float()；autocast "
        "下不要手动 .half()",
        "https://docs.pytorch.org/docs/stable/amp.html",
        confidence="likely",
    ),
    Cause(
        "sampling-nan",
        r"probability tensor contains either `?inf`?, `?nan`?|prob_\w+ contains .{0,30}nan|"
        r"Assertion `?probability_distribution|_assert_async_cuda_kernel",
        "the logits are nan or inf: fp16 overflowed (a model trained in bf16), weights are broken "
        "or badly quantized, or left padding and attention disagree",
        "torch_dtype=torch.bfloat16 (or float32) instead of float16; do_sample=False to see the "
        "tokens; check the weights for nan; temperature above 0; attn_implementation=\"eager\"",
        "logits 为 nan 或 inf：fp16 溢出（模型以 bf16 "
        "训练）、权重损坏或量化不当，或左填充与注意力不一致",
        "用 bfloat16（或 float32）代替 float16；do_sample=False；检查权重是否有 nan；temperature "
        "大于 0；attn_implementation=\"eager\"",
        "https://github.com/huggingface/transformers/issues/25664",
        confidence="likely",
    ),
    Cause(
        "loss-nan",
        r"\b[Ll]oss is (?:nan|NaN|inf)\b|returned nan values in its \d+th output|"
        r"found NaN in (?:local )?(?:grad|forward|loss)|NaN (?:or Inf )?(?:found|detected) in|"
        r"Loss is infinite or NaN|non-finite (?:loss|gradient)|Unexpected result (?:nan|inf) ",
        "the loss or a gradient became nan: too large a learning rate, fp16 overflow, log or "
        "division by zero, batches with no label left, or broken data",
        "bf16 instead of fp16; a lower learning rate, warm-up, clipping; "
        "torch.autograd.set_detect_anomaly(True) names the op; look at the batch: all labels -100? one rank only: its "
        "hardware",
        "loss 或梯度变为 nan：学习率过大、fp16 溢出、对零取对数或除零、没有有效标签的 "
        "batch，或数据损坏",
        "用 bf16 代替 fp16；降低学习率、预热、裁剪；torch.autograd.set_detect_anomaly(True) "
        "指出运算；检查该 batch：标签是否全为 -100",
        "https://docs.pytorch.org/docs/stable/autograd.html",
        confidence="likely",
    ),
    Cause(
        "tensor-to-numpy",
        r"Can't call numpy\(\) on Tensor that requires grad|"
        r"can't convert \w+(?::\d+)? device type tensor to numpy|"
        r"Got unsupported ScalarType (?P<type>\w+)",
        "NumPy takes tensors on the CPU, without gradient, of a dtype that it has (not bfloat16)",
        "x.detach().float().cpu().numpy()",
        "NumPy 只接受 CPU 上、无梯度、其支持的 dtype（不含 bfloat16）的张量",
        "x.detach().float().cpu().numpy()",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.numpy.html",
    ),
    Cause(
        "not-json",
        r"Object of type (?P<type>\w+) is not JSON serializable",
        "a {type} was given to json.dump: a config, metric or label of a type that JSON does not "
        "have",
        "convert it: x.item(), x.tolist(), str(x); for a model's config: pip install --upgrade "
        "transformers, or plain values in it",
        "把 {type} 交给了 json.dump：配置、指标或标签的类型不被 JSON 支持",
        "转换：x.item()、x.tolist()、str(x)；模型配置中使用普通值，或升级 transformers",
        "https://docs.python.org/3/library/json.html",
    ),
    Cause(
        "deepcopy-graph",
        r"Only Tensors created explicitly by the user \(graph leaves\) support the deepcopy",
        "a module that is copied holds a tensor computed with gradients (weight_norm, a cached "
        "activation, a loss kept in self)",
        "copy before the first forward; detach what is kept: self.x = x.detach(); "
        "parametrizations.weight_norm instead of weight_norm",
        "被复制的模块保存了带梯度计算的张量（weight_norm、缓存的激活、存于 self 的 loss）",
        "在第一次前向之前复制；保存时 detach；用 parametrizations.weight_norm",
        "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.detach.html",
    ),
    Cause(
        "inference-tensor",
        r"Inplace update to inference tensor|Inference tensors cannot be saved for backward",
        "a tensor made under torch.inference_mode is used where gradients are recorded or it is "
        "changed",
        "torch.no_grad() instead of inference_mode for what is used in training; x.clone() outside "
        "of it",
        "在 torch.inference_mode 下创建的张量被用于记录梯度或被原地修改",
        "训练中使用的部分改用 torch.no_grad()；在其外 x.clone()",
        "https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad_mode.inference_mode.html",
    ),
    Cause(
        "device-name",
        r"Invalid device string: '(?P<device>[^']{1,40})'|"
        r"Expected one of cpu, cuda.{0,300}device type at start of device string: (?P<other>\w+)",
        "torch has no device called {device}{other}",
        "\"cuda\", \"cuda:0\", \"cpu\" or \"mps\"; device_map=\"auto\" is an argument of from_pretrained only",
        "torch 没有名为 {device}{other} 的设备",
        "\"cuda\"、\"cuda:0\"、\"cpu\" 或 \"mps\"；device_map=\"auto\" 只是 from_pretrained 的参数",
        "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.device",
    ),
    Cause(
        "input-on-cpu",
        r"\b(?:q|k|v|x|input|qkv|query|tensor|u) must be on CUDA|expected input to be on cuda|"
        r"Input, output and indices must be on the current device|"
        r"Placeholder storage has not been allocated on MPS|must be a CUDA tensor|"
        r"Expected all inputs to be on CUDA",
        "an input lies on another device than the kernel or the weights",
        "x.to(model.device) for every input (ids, masks, labels); model.to(\"cuda\") before; "
        "torch.cuda.set_device(rank) where a kernel uses the current device",
        "某个输入与 kernel 或权重不在同一设备",
        "对每个输入 x.to(model.device)；先 model.to(\"cuda\")；使用当前设备的 kernel 需 "
        "torch.cuda.set_device(rank)",
        "https://docs.pytorch.org/docs/stable/notes/cuda.html",
        confidence="likely",
    ),
    Cause(
        "names-imported",
        r"\bname '(?P<name>init_empty_weights|is_accelerate_available|find_tied_parameters|"
        r"load_checkpoint_and_dispatch|dispatch_model|bnb|dist|PartialState|List|Optional|Any|Union|"
        r"Dict|Tuple|PreTrainedTokenizer\w*|PreTrainedModel|AutoModel\w*|AutoTokenizer|"
        r"GenerationConfig|LlamaTokenizer\w*|FSDP\w*|deepspeed|triton|tl|flash_attn\w*|"
        r"_flash_supports_window_size|apply_rotary_emb\w*|unpad_input|pad_input|"
        r"index_first_axis)' is not defined",
        "{name} was not imported: the optional package that brings it is missing or of a release "
        "that the importing code does not recognize, and the failed import was passed over",
        "pip install --upgrade accelerate transformers (bitsandbytes, deepspeed, flash-attn for "
        "the names of those), and restart the notebook; in your own file: the import line",
        "{name} 没有导入：提供它的可选包缺失或版本不被识别，导入失败被忽略",
        "pip install --upgrade accelerate transformers（或该名称所属的 "
        "bitsandbytes、deepspeed、flash-attn），并重启 notebook；自己的文件则补上 import",
        "https://github.com/huggingface/transformers/issues/37239",
        confidence="likely",
    ),
    Cause(
        "wrapped-output",
        r"not enough values to unpack \(expected (?P<want>\d+), got (?P<got>\d+)\)|"
        r"too many values to unpack \(expected (?P<many>\d+)\)|"
        r"cannot unpack non-iterable (?P<type>\w+) object",
        "a call returns another number of values than its caller takes apart: the two are of "
        "different versions",
        "the line above the message names the call; pip show that library; the release the caller "
        "was written for",
        "调用返回的值的个数与调用方拆分的不同：两者版本不同",
        "消息上一行即该调用；pip show 该库；使用调用方所适配的版本",
        "https://docs.python.org/3/tutorial/datastructures.html",
        confidence="possible",
    ),
    Cause(
        "eval-mode",
        r"Backward pass is invalid for module in evaluation mode|"
        r"RNN backward can only be called in training mode",
        "a module was left in evaluation mode (model.eval(), generation, validation) and is "
        "trained again",
        "model.train() after each evaluation; with a wrapped model on the outer one",
        "模块停留在评估模式（model.eval()、生成、验证）后又被训练",
        "每次评估后 model.train()；被包装的模型在外层调用",
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html",
    ),
    Cause(
        "generator-device",
        r"Expected a '(?P<want>\w+)' device type for generator but found '(?P<got>\w+)'",
        "a random generator of {got} is used for tensors on {want}, often through "
        "torch.set_default_device or a shuffling DataLoader",
        "torch.Generator(device=\"{want}\"); DataLoader(generator=torch.Generator(device=\"{want}\")), "
        "or no default device",
        "{got} 的随机数生成器被用于 {want} 张量，常因 torch.set_default_device 或打乱的 DataLoader",
        "torch.Generator(device=\"{want}\")；DataLoader(generator=...)，或不设默认设备",
        "https://docs.pytorch.org/docs/stable/generated/torch.Generator.html",
    ),
    Cause(
        "ragged-array",
        r"inhomogeneous shape after|setting an array element with a sequence",
        "rows of different lengths are made one array, which NumPy refuses since 1.24",
        "pad or truncate them to one length; dtype=object where a list of rows is meant; "
        "'numpy<1.24' for old code",
        "长度不同的行被合成一个数组，NumPy 1.24 起拒绝",
        "填充或截断为同一长度；确需列表时 dtype=object；旧代码用 'numpy<1.24'",
        "https://numpy.org/doc/stable/release/1.24.0-notes.html",
    ),
    Cause(
        "text-number",
        r"could not convert string to float|invalid literal for int\(\) with base",
        "text stands where a number is read: a heading, an empty cell, a unit, or YAML's 1e-4 "
        "(which is text: write 1.0e-4)",
        "the value in the message; skip the heading; float(x) in the config, or 1.0e-4",
        "应为数字处出现文本：表头、空单元格、单位，或 YAML 的 1e-4（为文本，应写 1.0e-4）",
        "查看消息中的值；跳过表头；配置中 float(x) 或写 1.0e-4",
        "https://docs.python.org/3/library/functions.html#float",
        confidence="likely",
    ),
    Cause(
        "image-nan",
        r"A tensor with (?:all )?NaNs was produced",
        "fp16 overflowed in the image model or its VAE",
        "--no-half-vae, then --no-half or --upcast-sampling; a VAE made for fp16; bf16",
        "图像模型或其 VAE 中 fp16 溢出",
        "--no-half-vae，其次 --no-half 或 --upcast-sampling；面向 fp16 的 VAE；bf16",
        "https://huggingface.co/madebyollin/sdxl-vae-fp16-fix",
        confidence="likely",
    ),
)  # fmt: skip
