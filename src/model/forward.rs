//! The forward pass, for every family: one line per operation, shapes beside it.

use super::arch::{Arch, Mask};
use super::program::{
    Act, AdapterSpec, Arrangement, LoraB, Matmul, MatrixId, MatrixSpec, Op, Origin, Output, Program, Role, RowSet, Source,
    VectorId, VectorSpec,
};

/// Writes down the forward pass of `arch`, with `adapter`'s low-rank parts on its draft rows if one is given.
///
/// Dispatches per layer: 6, and 10 with an adapter (each group of projections that has one adds a pass over A).
#[must_use]
pub fn build(arch: Arch, adapter: Option<&AdapterSpec>) -> Program {
    let mut b = Builder { arch, adapter, matrices: Vec::new(), vectors: Vec::new(), ops: Vec::new(), lora_width: 0 };
    let (d, f, v) = (b.arch.hidden_size, b.arch.intermediate_size, b.arch.vocab_size);
    let (q, kv, dh) = (b.arch.q_size(), b.arch.kv_size(), b.arch.head_dim);

    let table = b.matrix("model.embed_tokens", Role::Embedding, d, Arrangement::Stacked, &[("model.embed_tokens", v)]);
    let mask = match adapter {
        Some(a) if a.mask_embedding => Some(b.adapter_vector("mask_embedding", d)),
        _ => None,
    };
    let norm = |b: &mut Builder, name: String, n| b.vector(&name, Arrangement::Stacked, &[(format!("{name}.weight"), n)]);
    let gain = norm(&mut b, "model.layers.0.input_layernorm".into(), d);
    b.ops.push(Op::Embed { table, mask, gain }); // H, X [T, D]

    for layer in 0..b.arch.layers.len() {
        let at = format!("model.layers.{layer}");
        let name = |part: &str| format!("{at}.{part}");
        let kind = b.arch.layers[layer];

        // qkv [T, (Hq + 2 Hkv) Dh] = rms_norm(H) W_qkv
        let projections = [(name("self_attn.q_proj"), q), (name("self_attn.k_proj"), kv), (name("self_attn.v_proj"), kv)];
        let bias = b.arch.attention_bias.then(|| b.biases(&name("self_attn.qkv_proj"), Arrangement::Stacked, &projections));
        b.matmul(&name("self_attn.qkv_proj"), Arrangement::Stacked, &projections, d, Act::X, true, bias, Output::Store(Act::Qkv));

        // q, k = rope(norm(q, k)); k, v -> cache
        let (q_norm, k_norm) = if b.arch.qk_norm {
            (Some(norm(&mut b, name("self_attn.q_norm"), dh)), Some(norm(&mut b, name("self_attn.k_norm"), dh)))
        } else {
            (None, None)
        };
        b.ops.push(Op::RopeKv { layer, q_norm, k_norm, rope: kind.rope });

        // attn [T, Hq Dh] = softmax(q k / sqrt(Dh)) v
        b.ops.push(Op::Attention { layer, window: kind.window });

        // H [T, D] += attn W_o; X = H * gain of the MLP's norm
        let gain = norm(&mut b, name("post_attention_layernorm"), d);
        let projections = [(name("self_attn.o_proj"), d)];
        let bias = b.arch.output_bias.then(|| b.biases(&name("self_attn.o_proj"), Arrangement::Stacked, &projections));
        b.matmul(
            &name("self_attn.o_proj"),
            Arrangement::Stacked,
            &projections,
            q,
            Act::Attn,
            false,
            bias,
            Output::Residual { gain },
        );

        // ff [T, F] = silu(rms_norm(H) W_gate) * (rms_norm(H) W_up)
        let projections = [(name("mlp.gate_proj"), f), (name("mlp.up_proj"), f)];
        let bias = b.arch.mlp_bias.then(|| b.biases(&name("mlp.gate_up_proj"), Arrangement::Interleaved, &projections));
        b.matmul(
            &name("mlp.gate_up_proj"),
            Arrangement::Interleaved,
            &projections,
            d,
            Act::X,
            true,
            bias,
            Output::SwiGlu(Act::Ff),
        );

        // H [T, D] += ff W_down; X = H * gain of the next layer's norm
        let next = match layer + 1 < b.arch.layers.len() {
            true => format!("model.layers.{}.input_layernorm", layer + 1),
            false => "model.norm".to_owned(),
        };
        let gain = norm(&mut b, next, d);
        let projections = [(name("mlp.down_proj"), d)];
        let bias = b.arch.mlp_bias.then(|| b.biases(&name("mlp.down_proj"), Arrangement::Stacked, &projections));
        b.matmul(&name("mlp.down_proj"), Arrangement::Stacked, &projections, f, Act::Ff, false, bias, Output::Residual { gain });
    }

    // logits [choosing rows, V] = rms_norm(H) W_head
    let head = match b.arch.tie_word_embeddings {
        true => table,
        false => b.matrix("lm_head", Role::Head, d, Arrangement::Stacked, &[("lm_head", v)]),
    };
    b.ops.push(Op::Matmul(Matmul {
        weight: head,
        input: Act::X,
        norm: true,
        rows: RowSet::Choose,
        bias: None,
        lora: None,
        output: Output::Store(Act::Logits),
    }));

    let draft = adapter.map(|a| a.rules).or(b.arch.draft);
    let mask = match (mask, b.arch.mask_token_id) {
        (Some(_), _) => Some(Mask::Embedding),
        (None, Some(id)) if draft.is_some() || b.arch.diffusion.is_some() => Some(Mask::Token(id)),
        (None, _) => None,
    };
    // A mask that is a token of the vocabulary is an input only; a text never holds it.
    let banned = match mask {
        Some(Mask::Token(id)) => Some(id),
        _ => None,
    };
    b.ops.push(Op::ArgMax { banned });

    let Builder { arch, matrices, vectors, ops, lora_width, .. } = b;
    Program { draft: draft.filter(|_| mask.is_some()), mask, arch, matrices, vectors, ops, lora_width }
}

struct Builder<'a> {
    arch: Arch,
    adapter: Option<&'a AdapterSpec>,
    matrices: Vec<MatrixSpec>,
    vectors: Vec<VectorSpec>,
    ops: Vec<Op>,
    lora_width: usize,
}

impl Builder<'_> {
    fn matrix<S: AsRef<str>>(
        &mut self,
        label: &str,
        role: Role,
        k: usize,
        arrangement: Arrangement,
        parts: &[(S, usize)],
    ) -> MatrixId {
        let sources =
            parts.iter().map(|(name, rows)| tensor(Origin::Base, format!("{}.weight", name.as_ref()), *rows, k)).collect();
        self.push_matrix(label, role, k, arrangement, sources)
    }

    fn push_matrix(&mut self, label: &str, role: Role, k: usize, arrangement: Arrangement, sources: Vec<Source>) -> MatrixId {
        let n = sources.iter().map(Source::rows).sum();
        self.matrices.push(MatrixSpec { label: label.to_owned(), n, k, role, sources, arrangement });
        MatrixId(self.matrices.len() - 1)
    }

    fn vector(&mut self, label: &str, arrangement: Arrangement, parts: &[(String, usize)]) -> VectorId {
        let sources: Vec<_> = parts.iter().map(|(name, rows)| tensor(Origin::Base, name.clone(), *rows, 1)).collect();
        self.push_vector(label, arrangement, sources)
    }

    fn push_vector(&mut self, label: &str, arrangement: Arrangement, sources: Vec<Source>) -> VectorId {
        let n = sources.iter().map(Source::rows).sum();
        self.vectors.push(VectorSpec { label: label.to_owned(), n, sources, arrangement });
        VectorId(self.vectors.len() - 1)
    }

    fn adapter_vector(&mut self, name: &str, n: usize) -> VectorId {
        self.push_vector(name, Arrangement::Stacked, vec![tensor(Origin::Adapter, name.to_owned(), n, 1)])
    }

    fn biases(&mut self, label: &str, arrangement: Arrangement, projections: &[(String, usize)]) -> VectorId {
        let parts: Vec<_> = projections.iter().map(|(name, rows)| (format!("{name}.bias"), *rows)).collect();
        self.vector(&format!("{label}.bias"), arrangement, &parts)
    }

    /// Pushes the pass over A for the projections that have an adapter, then the product itself.
    #[allow(clippy::too_many_arguments, reason = "one call per line of the forward pass")]
    fn matmul(
        &mut self,
        label: &str,
        arrangement: Arrangement,
        projections: &[(String, usize)],
        k: usize,
        input: Act,
        norm: bool,
        bias: Option<VectorId>,
        output: Output,
    ) {
        let lora = self.lora(label, arrangement, projections, k, input, norm);
        let weight = self.matrix(label, Role::Linear, k, arrangement, projections);
        self.ops.push(Op::Matmul(Matmul { weight, input, norm, rows: RowSet::All, bias, lora, output }));
    }

    fn lora(
        &mut self,
        label: &str,
        arrangement: Arrangement,
        projections: &[(String, usize)],
        k: usize,
        input: Act,
        norm: bool,
    ) -> Option<LoraB> {
        let adapter = self.adapter?;
        let has = |name: &String| adapter.modules.contains(name);
        if !projections.iter().any(|(name, _)| has(name)) {
            return None;
        }
        // Kernels read inner activations four at a time; the ranks that this adds are zero.
        let rank = adapter.rank.next_multiple_of(4);
        let part = |name: &String, which: &str, rows, k| match has(name) {
            true => tensor(Origin::Adapter, format!("{name}.{which}.weight"), rows, k),
            false => Source::Zeros { rows },
        };
        let a = projections.iter().map(|(name, _)| part(name, "lora_A", rank, k)).collect();
        let b = projections.iter().map(|(name, rows)| part(name, "lora_B", *rows, rank)).collect();
        let a = self.push_matrix(&format!("{label}.lora_A"), Role::Lora, k, Arrangement::Stacked, a);
        let b = self.push_matrix(&format!("{label}.lora_B"), Role::Lora, rank, arrangement, b);
        self.lora_width = self.lora_width.max(rank * projections.len());
        // lora [adapter rows, segments * rank] = norm(input) A
        self.ops.push(Op::Matmul(Matmul {
            weight: a,
            input,
            norm,
            rows: RowSet::Adapter,
            bias: None,
            lora: None,
            output: Output::Store(Act::Lora),
        }));
        let n: usize = projections.iter().map(|(_, rows)| rows).sum();
        let mut ends = projections.iter().scan(0, |end, (_, rows)| {
            *end += rows;
            Some(*end)
        });
        let segment_starts = [ends.next().unwrap_or(n), ends.next().unwrap_or(n)];
        Some(LoraB { b, rank, scale: adapter.scale, segment_starts, arrangement })
    }
}

fn tensor(origin: Origin, name: String, rows: usize, k: usize) -> Source {
    Source::Tensor { origin, name, rows, k }
}
