//! The header of a GGUF file. It contains the metadata (called *facts* here), which describes the model, and the type,
//! shape and file offset of each tensor.
//!
//! Supports the versions 2 and 3 of <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::BTreeMap;
use std::io::Read;

use serde_json::{Map, Value};
use trainable_candle_core::DType;
use trainable_candle_core::quantized::Ggml;

/// The dtype to which blocks are dequantized if the caller requests no dtype.
pub(crate) const BLOCK_DTYPE: DType = DType::BF16;
/// The first four bytes of a GGUF file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
/// The largest allowed number of elements of an array in the metadata. The longest arrays are vocabularies, with a few
/// hundred thousand elements.
const LONGEST_ARRAY: u64 = 1 << 23;
/// The largest number of dimensions of a tensor.
const MOST_DIMENSIONS: u32 = 4;
/// The name of the fact with the alignment of the tensors' data, and the alignment in bytes if a file does not have
/// this fact.
const ALIGNMENT: (&str, u64) = ("general.alignment", 32);

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The values are floating-point numbers of this dtype.
    Plain(DType),
    /// The values are in blocks of quantized elements.
    Blocks(Ggml),
}

impl Kind {
    /// The dtype to which the values are read by default.
    pub(crate) const fn dtype(self) -> DType {
        match self {
            Self::Plain(dtype) => dtype,
            Self::Blocks(_) => BLOCK_DTYPE,
        }
    }
}

/// The header's entry of a tensor.
#[derive(Clone, Debug)]
pub(crate) struct Info {
    /// The shape, with the slowest dimension first.
    pub dims: Vec<usize>,
    pub kind: Kind,
    /// The offset of the tensor's data from the beginning of the file, in bytes.
    pub start: u64,
    /// The size of the tensor's data in bytes.
    pub bytes: usize,
}

/// A complete header.
#[derive(Debug)]
pub(crate) struct Header {
    /// The metadata: values by name.
    pub facts: Map<String, Value>,
    /// The entries of the tensors by name.
    pub tensors: BTreeMap<String, Info>,
}

/// Parse the header of a file of `length` bytes. The error is a message that says what is wrong with the file.
pub(crate) fn parse(file: impl Read, length: u64) -> Result<Header, String> {
    let mut reader = Reader { file, at: 0, length };
    let magic = reader.bytes::<4>()?;
    let version = reader.u32()?;
    if magic != MAGIC || !(2..=3).contains(&version) {
        // The version of a big-endian file has its bytes in reverse.
        let text = match version.swap_bytes() {
            _ if magic != MAGIC => "not a GGUF file: it does not begin with \"GGUF\"".to_owned(),
            2 | 3 => {
                "its numbers are big-endian, which is not supported; convert it with gguf-convert-endian".to_owned()
            }
            _ => format!("it has version {version} of the format, expected 2 or 3; download a newer file"),
        };
        return Err(text);
    }
    let (tensor_count, fact_count) = (reader.u64()?, reader.u64()?);
    let mut facts = Map::new();
    for _ in 0..fact_count {
        let name = reader.text()?;
        let kind = reader.u32()?;
        let value = reader.value(kind, &name)?;
        facts.insert(name, value);
    }
    let alignment = facts.get(ALIGNMENT.0).map_or(Some(ALIGNMENT.1), Value::as_u64);
    let Some(alignment) = alignment.filter(|alignment| alignment.is_power_of_two()) else {
        return Err(format!("{} is {}, expected a power of two", ALIGNMENT.0, facts[ALIGNMENT.0]));
    };
    if facts.get("split.count").and_then(Value::as_u64).is_some_and(|count| count > 1) {
        return Err("the file is one of several parts; join them with llama-gguf-split --merge".to_owned());
    }
    let mut tensors = BTreeMap::new();
    for _ in 0..tensor_count {
        let name = reader.text()?;
        let info = reader.info(&name, &facts)?;
        if tensors.insert(name.clone(), info).is_some() {
            return Err(format!("the file has two tensors \"{name}\""));
        }
    }
    // Where the tensors' data begins. `incomplete` needs some type of reader, but does not depend on it.
    let data_start = reader.at.checked_next_multiple_of(alignment).ok_or_else(Reader::<&[u8]>::incomplete)?;
    for (name, info) in &mut tensors {
        let start = info.start.checked_add(data_start);
        let end = start.and_then(|start| start.checked_add(info.bytes as u64));
        let (Some(start), Some(end)) = (start, end) else { return Err(Reader::<&[u8]>::incomplete()) };
        if end > length {
            return Err(format!(
                "the file is incomplete or damaged: it has {length} bytes, but tensor \"{name}\" ends at byte {end}; \
                 download or copy it again"
            ));
        }
        info.start = start;
    }
    Ok(Header { facts, tensors })
}

struct Reader<R> {
    file: R,
    /// The number of bytes read so far.
    at: u64,
    /// The file's size in bytes.
    length: u64,
}

impl<R: Read> Reader<R> {
    fn incomplete() -> String {
        "the file is incomplete or damaged: its header ends early; download or copy it again".to_owned()
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes).map_err(|_| Self::incomplete())?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Read a string. Invalid UTF-8, which occurs in the vocabularies of old files, is replaced by U+FFFD.
    fn text(&mut self) -> Result<String, String> {
        let length = self.u64()?;
        if length > self.length.saturating_sub(self.at) {
            return Err(Self::incomplete());
        }
        let mut bytes = vec![0; length as usize];
        self.file.read_exact(&mut bytes).map_err(|_| Self::incomplete())?;
        self.at += length;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Read the value of the fact `name`. `kind` is the format's number for the value's type.
    fn value(&mut self, kind: u32, name: &str) -> Result<Value, String> {
        Ok(match kind {
            0 => self.bytes().map(u8::from_le_bytes)?.into(),
            1 => self.bytes().map(i8::from_le_bytes)?.into(),
            2 => self.bytes().map(u16::from_le_bytes)?.into(),
            3 => self.bytes().map(i16::from_le_bytes)?.into(),
            4 => self.u32()?.into(),
            5 => self.bytes().map(i32::from_le_bytes)?.into(),
            6 => short_number(f32::from_le_bytes(self.bytes()?)),
            7 => (self.bytes::<1>()? != [0]).into(),
            8 => self.text()?.into(),
            // A list: the type of its elements, their number, and the elements.
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                if kind == 9 || count > LONGEST_ARRAY.min(self.length) {
                    return Err(format!(
                        "the metadata entry \"{name}\" is a list of lists, or a list of {count} elements, which is too \
                         long; is the file damaged?"
                    ));
                }
                (0..count).map(|_| self.value(kind, name)).collect::<Result<Vec<_>, _>>()?.into()
            }
            10 => self.u64()?.into(),
            11 => self.bytes().map(i64::from_le_bytes)?.into(),
            12 => f64::from_le_bytes(self.bytes()?).into(),
            other => {
                return Err(format!(
                    "the metadata entry \"{name}\" has type {other}, which the format does not have; is the file \
                     damaged?"
                ));
            }
        })
    }

    /// Read the entry of the tensor `name`. The entry's `start` is relative to the beginning of the file's tensor data.
    fn info(&mut self, name: &str, facts: &Map<String, Value>) -> Result<Info, String> {
        let rank = self.u32()?;
        if rank > MOST_DIMENSIONS {
            return Err(format!("tensor \"{name}\" has {rank} dimensions, expected at most {MOST_DIMENSIONS}"));
        }
        // Files store the fastest dimension first.
        let mut dims = (0..rank).map(|_| Ok(self.u64()? as usize)).collect::<Result<Vec<_>, String>>()?;
        dims.reverse();
        let (kind, start) = (self.u32()?, self.u64()?);
        let kind = kind_of(kind, name)?;
        let overflow = || format!("tensor \"{name}\" has shape {dims:?}, which is too large; is the file damaged?");
        let count = |dims: &[usize]| dims.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        let elements = count(&dims).ok_or_else(overflow)?;
        let bytes = match kind {
            Kind::Plain(dtype) => elements.checked_mul(dtype.size_in_bytes()),
            Kind::Blocks(format) => {
                let (columns, block) = (dims.last().copied().unwrap_or(1), format.block());
                let row = format.row_bytes(columns).ok_or_else(|| {
                    format!(
                        "tensor \"{name}\" has rows of {columns} elements, expected a multiple of {block} for {}",
                        format.name()
                    )
                })?;
                row.checked_mul(elements.checked_div(columns).unwrap_or(0))
            }
        };
        let bytes = bytes.ok_or_else(overflow)?;
        // If the rows of a tensor are not whole blocks, the tensor is stored in another shape, and this fact holds the
        // original shape.
        let original = facts.get(&format!("comfy.gguf.orig_shape.{name}")).and_then(Value::as_array);
        if let Some(shape) = original {
            let shape: Option<Vec<usize>> = shape.iter().map(|size| usize::try_from(size.as_u64()?).ok()).collect();
            let Some(shape) = shape.filter(|shape| count(shape) == Some(elements)) else {
                return Err(format!(
                    "tensor \"{name}\" has {elements} elements, but the shape in comfy.gguf.orig_shape has another number \
                     of elements"
                ));
            };
            dims = shape;
        }
        Ok(Info { dims, kind, start, bytes })
    }
}

/// The f64 that prints like the f32 `value` (1e-6, not 9.999999974752427e-7). Null if `value` is not finite.
fn short_number(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// The numbers and names of the tensor types that are not supported.
const UNSUPPORTED: [(u32, &str); 27] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// How the values of the tensor `name` are stored. `id` is the format's number for the tensor's type.
fn kind_of(id: u32, name: &str) -> Result<Kind, String> {
    match id {
        0 => return Ok(Kind::Plain(DType::F32)),
        1 => return Ok(Kind::Plain(DType::F16)),
        30 => return Ok(Kind::Plain(DType::BF16)),
        _ => {}
    }
    if let Some(format) = Ggml::ALL.into_iter().find(|format| format.id() == id) {
        return Ok(Kind::Blocks(format));
    }
    let name_or_number = UNSUPPORTED
        .iter()
        .find(|(other, _)| *other == id)
        .map_or_else(|| id.to_string(), |(_, name)| (*name).to_owned());
    Err(format!(
        "tensor \"{name}\" has the type {name_or_number}, which is not supported; use a file of Q8_0, Q6_K, Q5_K, Q4_K \
         (Q4_K_M), Q5_1, Q5_0, Q4_1, Q4_0, F32, F16 or BF16"
    ))
}
