"""Programs that Triton's and Dynamo's compilers refuse, by the reason inside their message."""

from powertrain.doctor.causes.cause import Cause

_TRITON = "https://triton-lang.org/main/python-api/triton.language.html"

CAUSES = (
    Cause(
        "triton-older-than-kernel",
        r"AttributeError\(\"'(?:tensor|constexpr|dtype|block_type|pointer_type)' object has no attribute "
        r"'(?P<name>\w+)'|"
        r"AttributeError\(\"module 'triton\.language[\w.]*' has no attribute '(?P<module>\w+)'|"
        r"^\W{0,9}AttributeError: '(?:tensor|constexpr)' object has no attribute '(?P<bare>cast|to|sum|advance|type|"
        r"logical_and|logical_or)'",
        "the kernel's source uses {name}{module}{bare} of Triton's language, which the installed Triton does not "
        "have: it is older than the library with the kernel",
        "the Triton that this library asks for (with its torch: pip install --upgrade torch), or an older release of "
        "the library (liger-kernel, fla, mamba-ssm ...)",
        "核函数使用了 Triton 语言的 {name}{module}{bare}，而所装 Triton 没有：它比该库旧",
        "安装该库要求的 Triton（随 torch 升级），或使用较旧的库（liger-kernel、fla、mamba-ssm 等）",
        "https://github.com/hiyouga/LlamaFactory/issues/5784",
        confidence="likely",
    ),
    Cause(
        "triton-newer-than-kernel",
        r"TypeError\(\W{1,3}(?P<call>dot|load|store|atomic_\w+|max|min|sum|arange|make_block_ptr|view|trans|where|"
        r"softmax)"
        r"\(\) (?:got|missing|takes) (?P<what>.{1,100})|"
        r"module 'triton\.language[\w.]*' has no attribute '(?P<gone>libdevice|math|constexpr|ops|extra)'",
        "the kernel calls tl.{call}{gone} in a form that the installed Triton does not have any more: the model's or "
        "the library's kernel is older than Triton",
        "a newer release of the library with the kernel; for code that a model brings along: uninstall triton there or "
        "switch its kernel off (attn_implementation, use_flash_attn=False), so that plain attention is used; an older "
        "Triton with its torch",
        "核函数调用 tl.{call}{gone} 的形式在所装 Triton 中已不存在：核函数比 Triton 旧",
        "升级含该核函数的库；模型自带的代码：关闭其核函数（attn_implementation、use_flash_attn=False）；或使用较旧的 "
        "Triton 与 torch",
        "https://github.com/MAGICS-LAB/DNABERT_2/issues/57",
        confidence="likely",
    ),
    Cause(
        "triton-tile-small",
        r"[Ii]nput shapes should have M >= \d+|"
        r"(?:first|second) (?:non-batch )?(?:input )?(?:shape|dim)\w* .{0,60}must be (?:>=|at least) 16|"
        r"all (?:values|dimensions) in both first input shape .{0,80}must be >= 16",
        "tl.dot needs tiles of at least 16 in each dim, and a size of the model (head dim, group, rank) or of the "
        "batch is smaller",
        "pad that size to 16; a newer Triton takes smaller M; another backend for this layer",
        "tl.dot 要求每维至少 16，而模型的某个大小（head dim、group、rank）或 batch 更小",
        "将该大小补齐到 16；更新的 Triton 允许更小的 M；或为该层换后端",
        _TRITON,
    ),
    Cause(
        "triton-power-of-two",
        r"arange's (?:range must be a power of 2|arguments must be of type tl\.constexpr|end argument must be)|"
        r"Shape element \d+ must be a power of 2|numel \(\d+\) exceeds triton maximum tensor numel|"
        r"Maximum allowed number of elements is \d+",
        "a block size of the kernel is no power of two, no constant, or too large",
        "BLOCK = triton.next_power_of_2(size) with a mask, and BLOCK: tl.constexpr; sizes of 2**20 elements at most",
        "核函数的块大小不是 2 的幂、不是常量，或太大",
        "BLOCK = triton.next_power_of_2(size) 并加 mask；BLOCK: tl.constexpr；最多 2**20 个元素",
        _TRITON,
    ),
    Cause(
        "triton-global",
        r"Cannot access global variable (?P<name>\w+) from within @jit|NameError\('global variable|"
        r"CompilationError.{0,80}NameError\(|^\W{0,9}NameError\([\"'](?P<other>[^\"']{1,80})",
        "a Triton kernel reads a Python global, which newer Triton refuses: {name}{other}",
        "pass it as an argument (tl.constexpr), or make the global a tl.constexpr(...); an older Triton for "
        "code that is not yours",
        "Triton 核函数读取了 Python 全局变量，新版 Triton 拒绝：{name}{other}",
        "作为参数（tl.constexpr）传入，或定义为 tl.constexpr(...)；他人代码则用较旧的 Triton",
        "https://github.com/triton-lang/triton/issues/4048",
        confidence="likely",
    ),
    Cause(
        "triton-types",
        r"IncompatibleTypeErrorImpl|invalid operands of type|UnsupportedLanguageConstruct|"
        r"Loop-carried variable \w+ has initial type|Mismatched type for \w+ between then block|"
        r"AssertionError\('(?:Loop-carried|Mismatched|Both operands must be)|unsupported AST node type|"
        r"Both operands must be same (?:type|dtype)|First input \(.{1,40}\) and second input .{1,80}must have the "
        r"same dtype|"
        r"did you forget to add @triton\.jit|Cannot call @triton\.jit'd outside",
        "the kernel's source does not type-check in this Triton: dtypes of two operands, or of a variable before and "
        "inside a loop, differ, or a construct is not of its language",
        "tensors of one dtype at the call (autocast leaves some in float32); .to(...) in a kernel of yours; the Triton "
        "that the library was written for",
        "核函数源码在该 Triton 中类型不符：两个操作数或循环前后变量的 dtype 不同，或使用了不支持的语法",
        "调用时张量 dtype 一致（autocast 会保留部分 float32）；自己的核函数中用 .to(...)；使用该库所适配的 Triton",
        _TRITON,
        confidence="likely",
    ),
    Cause(
        "no-triton-configs",
        r"No valid triton configs|NoTritonConfigsError",
        "none of Inductor's tile sizes fits this GPU's shared memory or registers",
        "TORCHINDUCTOR_MAX_AUTOTUNE=0 (mode other than max-autotune); a newer torch; for flex_attention: "
        "kernel_options={\"BLOCK_M\": 32, \"BLOCK_N\": 32, \"num_stages\": 1}",
        "Inductor 的所有块大小都超出该 GPU 的共享内存或寄存器",
        "不用 max-autotune；升级 torch；flex_attention：kernel_options={\"BLOCK_M\": 32, \"BLOCK_N\": 32, "
        "\"num_stages\": 1}",
        "https://github.com/pytorch/pytorch/issues/133254",
    ),
    Cause(
        "triton-gpu-too-old",
        r"Found (?P<gpu>.{1,60}?) which is too old to be supported by the triton|"
        r"Triton only supports devices of CUDA Capability",
        "{gpu} is older than compute capability 7.0, which Triton and torch.compile need",
        "TORCHDYNAMO_DISABLE=1 (or backend=\"aot_eager\"); attn_implementation=\"sdpa\"; a newer GPU",
        "{gpu} 低于 Triton 与 torch.compile 要求的计算能力 7.0",
        "TORCHDYNAMO_DISABLE=1（或 backend=\"aot_eager\"）；attn_implementation=\"sdpa\"；更新的 GPU",
        "https://github.com/pytorch/pytorch/issues/98271",
    ),
    Cause(
        "dynamo-shapes",
        r"(?:Failed running call_\w+ .{1,1500}|Dynamo failed to run FX node with fake tensors: .{1,1500}?)"
        r"(?P<reason>(?:a and b must have|Attempting to broadcast|shape mismatch|Expected |expected |Unhandled "
        r"FakeTensor|"
        r"The size of|mat1 and mat2|Sizes of|shape '|self and)[^\n]{1,160})",
        "the operation fails without torch.compile too (shapes, dtypes or devices do not fit): {reason}",
        "run the model once without compile for the plain error; make shapes, dtypes and devices equal there",
        "不用 torch.compile 该运算也会失败（形状、dtype 或设备不符）：{reason}",
        "先不编译运行一次以得到原始错误；使形状、dtype、设备一致",
        "https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html",
        confidence="likely",
    ),
    Cause(
        "instruction-not-on-gpu",
        r"(?:Instruction|Feature|Modifier) '(?P<what>[\w.:]{1,60})' (?:not supported on|requires) \.target "
        r"'(?P<arch>\w+)'|"
        r"Cannot select: intrinsic %llvm\.nvvm\.(?P<intrinsic>tcgen05|wgmma|mma\.sync|cp\.async)\w*",
        "the kernel uses {what}{intrinsic}, an instruction that this GPU ({arch}) does not have: it was written for "
        "another generation (wgmma: sm_90, tcgen05: sm_100, neither on sm_120)",
        "another backend or kernel for this GPU (attn_implementation, TRITON_ATTN, SDPA); a newer release of the "
        "library with a path for it",
        "核函数使用了该 GPU（{arch}）没有的指令 {what}{intrinsic}：面向另一代（wgmma：sm_90，tcgen05：sm_100，sm_120 "
        "均无）",
        "为该 GPU 换用其他后端或核函数；升级该库",
        "https://github.com/triton-lang/triton/issues/11747",
        confidence="likely",
    ),
    Cause(
        "ptxas-does-not-run",
        r"`?ptxas`? failed with error code (?:4294967295|32[0-9]{8}|-\d+|127|126)",
        "ptxas itself does not run here: its file is damaged, of another system, blocked, or lacks a runtime library",
        "pip install --force-reinstall triton (Windows: triton-windows, and Microsoft's VC++ redistributable); run "
        "that ptxas --version; TRITON_PTXAS_PATH=<CUDA>/bin/ptxas",
        "ptxas 自身无法运行：文件损坏、属于其他系统、被拦截，或缺少运行库",
        "重装 triton（Windows：triton-windows 与 VC++ 运行库）；运行 ptxas --version；"
        "TRITON_PTXAS_PATH=<CUDA>/bin/ptxas",
        "https://github.com/woct0rdho/triton-windows/issues/66",
        confidence="likely",
    ),
    Cause(
        "compiled-layout",
        r"assert_size_stride\(|AssertionError: expected size \d+==\d+, stride|wrong number of dimensions\b.{0,40}for "
        r"op",
        "a compiled graph got a tensor of another shape or stride than it was compiled for: the fake implementation "
        "of a custom operator differs from the real one, a parameter changed (FSDP, quantization) after compiling, or "
        "a defect of this torch",
        "compile after wrapping and sharding, and whole blocks instead of single layers; make the fake implementation "
        "return the real strides (torch.library.opcheck); a newer torch; backend=\"aot_eager\" narrows it down",
        "编译后的图得到与编译时不同形状或步长的张量：自定义算子的 fake 实现与实际不同、编译后参数改变（FSDP、量化），"
        "或该 torch 的缺陷",
        "先包装、分片再编译，编译整个块而非单层；fake 实现返回实际步长（torch.library.opcheck）；升级 torch；用 "
        "backend=\"aot_eager\" 缩小范围",
        "https://github.com/pytorch/pytorch/issues/139222",
        confidence="likely",
    ),
    Cause(
        "cxx-launcher-old-msvc",
        r"__triton_launcher\.c\(\d+\): error C\d+|(?:cuda_utils|driver)\.c\(\d+\): error C\d+",
        "the C compiler that Triton found is too old for its launcher: Visual Studio 2019's, or one of another Windows "
        "SDK",
        "Visual Studio 2022 build tools (MSVC 14.3 or later), and CC=<its cl.exe> or its developer prompt; a newer "
        "triton-windows brings a compiler",
        "Triton 找到的 C 编译器太旧（Visual Studio 2019）",
        "安装 Visual Studio 2022 生成工具（MSVC 14.3 以上），设置 CC=<其 cl.exe>；新版 triton-windows 自带编译器",
        "https://github.com/woct0rdho/triton-windows/issues/178",
        confidence="likely",
    ),
)  # fmt: skip
