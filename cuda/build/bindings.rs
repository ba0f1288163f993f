//! Generates code from the signatures of kernels: Rust structures that hold a kernel's arguments, and CUDA assertions that a structure
//! used in both languages has the same memory layout in both.

use std::fmt::Write;

use crate::signature::{Parameter, Pointer, Signature};
use crate::structs::LAYOUTS;

/// The kernels of one file.
pub struct Source {
    pub name: String,
    pub signatures: Vec<Signature>,
}

/// Suffixes of kernel names: dtypes, or the element size in bytes for kernels of any dtype.
const SUFFIXES: [&str; 11] = ["f32", "f64", "f16", "bf16", "u8", "u32", "i64", "1", "2", "4", "8"];

/// The types of parameters. Each entry has the type's name in CUDA, its name in Rust (empty if kernels take only pointers to the type),
/// and the `Element` of pointers to it.
const TYPES: [(&str, &str, &str); 14] = [
    ("uint8_t", "u8", "U8"),
    ("uint16_t", "u16", "U16"),
    ("uint32_t", "u32", "U32"),
    ("uint64_t", "u64", "U64"),
    ("Counter", "u64", "U64"),
    ("int16_t", "i16", "I16"),
    ("int32_t", "i32", "I32"),
    ("int64_t", "i64", "I64"),
    ("float", "f32", "F32"),
    ("double", "f64", "F64"),
    ("__half", "", "F16"),
    ("__nv_bfloat16", "", "BF16"),
    ("void", "", "Any"),
    ("int", "i32", "I32"),
];

/// A kernel and its variants for dtypes.
struct Kernel<'a> {
    /// The name without dtypes.
    name: &'a str,
    /// The dtypes in the name of each variant, and the variant's signature.
    variants: Vec<(Vec<&'a str>, &'a Signature)>,
    /// Names and Rust types of the fields of the structure of arguments: one field per parameter.
    fields: Vec<(&'a str, String)>,
}

/// The Rust code for one file of kernels: a module that `src/linked/kernels.rs` includes.
pub fn module(source: &Source) -> Result<String, String> {
    let mut kernels: Vec<Kernel<'_>> = Vec::new();
    for signature in &source.signatures {
        let (name, dtypes) = stem(&signature.name);
        let fields = signature.parameters.iter().map(|parameter| field(&signature.name, parameter));
        let fields = fields.collect::<Result<Vec<_>, _>>()?;
        match kernels.iter_mut().find(|kernel| kernel.name == name) {
            Some(kernel) if kernel.fields == fields => kernel.variants.push((dtypes, signature)),
            Some(kernel) => {
                let (_, other) = kernel.variants[0];
                return Err(format!("{} and {} take different arguments; rename one", other.name, signature.name));
            }
            None => kernels.push(Kernel { name, variants: vec![(dtypes, signature)], fields }),
        }
    }
    let file = &source.name;
    let mut code = format!(
        "/// The kernels of `kernels/{file}.cu`.\n\
         #[allow(missing_docs, reason = \"the fields are those of CUDA\")]\n\
         pub mod {file} {{\n\
         use super::*;\n\
         /// The compiled code of these kernels.\n\
         pub static MODULE: Module =\n\
         Module {{ name: \"{file}\", image: include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{file}.fatbin\")) }};\n"
    );
    let mut written: Vec<&Kernel<'_>> = Vec::new();
    for kernel in &kernels {
        match written.iter().find(|other| other.fields == kernel.fields) {
            Some(other) => alias(&mut code, kernel, other),
            None => arguments(&mut code, kernel, &kernels),
        }
        constant(&mut code, kernel);
        written.push(kernel);
    }
    code.push_str("}\n");
    Ok(code)
}

/// A kernel's name without its dtypes, and the dtypes.
fn stem(full: &str) -> (&str, Vec<&str>) {
    let (mut name, mut dtypes) = (full, Vec::new());
    while let Some((before, dtype)) = name.rsplit_once('_').filter(|(_, end)| SUFFIXES.contains(end)) {
        name = before;
        dtypes.insert(0, dtype);
    }
    (name, dtypes)
}

/// A parameter's name, and the Rust type of its field in the structure of arguments.
fn field<'a>(kernel: &str, parameter: &'a Parameter) -> Result<(&'a str, String), String> {
    let Parameter { name, class, pointer } = parameter;
    let structure = LAYOUTS.iter().find(|layout| layout.name == class);
    let known = TYPES.iter().find(|(cuda, ..)| cuda == class);
    if structure.is_none() && known.is_none() {
        return Err(format!("{kernel} takes {class} {name}, which src/structs.rs does not have; add it there"));
    }
    let class = match (pointer, structure, known) {
        (Some(Pointer::Const), ..) => "Const".to_owned(),
        (Some(Pointer::Mut), ..) => "Mut".to_owned(),
        (None, Some(structure), _) => format!("structs::{}", in_rust(structure.name)),
        (None, None, Some((_, rust, _))) if !rust.is_empty() => (*rust).to_owned(),
        _ => return Err(format!("{kernel} takes {class} {name} by value; declare it as double")),
    };
    Ok((name, class))
}

/// A structure's type in Rust: `Mask` for CUDA's `Mask<float>`. Template arguments that are numbers remain: `Strided<4>`.
fn in_rust(name: &str) -> &str {
    let (base, parameters) = name.split_once('<').unwrap_or((name, ""));
    if parameters.starts_with(|c: char| c.is_ascii_digit()) { name } else { base }
}

/// The name of a structure of arguments: `AddOne` for the kernel `add_one`.
fn camel(name: &str) -> String {
    let word = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').filter(|part| !part.is_empty()).map(word).collect()
}

/// Writes the name of a kernel's arguments as an alias of the structure of `other`, a kernel with the same arguments.
fn alias(code: &mut String, kernel: &Kernel<'_>, other: &Kernel<'_>) {
    let (class, target) = (camel(kernel.name), camel(other.name));
    let _ = writeln!(code, "/// The arguments of `{}`.\npub type {class} = {target};", kernel.name);
}

/// Writes the structure of a kernel's arguments. All kernels with the same arguments share it.
fn arguments(code: &mut String, kernel: &Kernel<'_>, kernels: &[Kernel<'_>]) {
    let class = camel(kernel.name);
    let _ =
        writeln!(code, "/// The arguments of `{}`.\n#[derive(Clone, Copy, Debug)]\npub struct {class} {{", kernel.name);
    for (name, class) in &kernel.fields {
        let _ = writeln!(code, "pub {name}: {class},");
    }
    let all = kernels.iter().filter(|other| other.fields == kernel.fields);
    let all: Vec<String> = all.map(|other| format!("&{}", other.name.to_uppercase())).collect();
    let is_pointer = |class: &str| class == "Const" || class == "Mut";
    // In the generated code, the function `place` returns the address of an argument.
    let place = |(name, class): &(&str, String)| match is_pointer(class) {
        true => format!("place(&self.{name}.address)"),
        false => format!("place(&self.{name})"),
    };
    let places: Vec<String> = kernel.fields.iter().map(place).collect();
    let pointers = kernel.fields.iter().filter(|(_, class)| is_pointer(class));
    let elements: Vec<String> = pointers.map(|(name, _)| format!("self.{name}.element")).collect();
    let _ = writeln!(
        code,
        "}}\n\
         // SAFETY: made from the kernels' signatures.\n\
         unsafe impl Arguments for {class} {{\n\
         const KERNELS: &'static [&'static Kernel<Self>] = &[{}];\n\
         fn lend<R>(&self, to: impl FnOnce(&mut [*mut c_void], &[Element]) -> R) -> R {{\n\
         to(&mut [{}], &[{}])\n\
         }}\n\
         }}",
        all.join(", "),
        places.join(", "),
        elements.join(", ")
    );
}

/// Writes the static variable of a kernel, with the dtypes and the pointers of its variants.
fn constant(code: &mut String, kernel: &Kernel<'_>) {
    let (name, constant, class) = (kernel.name, kernel.name.to_uppercase(), camel(kernel.name));
    let _ =
        writeln!(code, "/// `{name}`.\npub static {constant}: Kernel<{class}> = Kernel::new(&MODULE, \"{name}\", &[");
    for (dtypes, signature) in &kernel.variants {
        let pointers = signature.parameters.iter().filter(|parameter| parameter.pointer.is_some());
        let pointers: Vec<String> =
            pointers.map(|pointer| format!("(\"{}\", Element::{})", pointer.name, element(pointer))).collect();
        let _ = writeln!(code, "Variant {{ dtypes: &{dtypes:?}, pointers: &[{}] }},", pointers.join(", "));
    }
    code.push_str("]);\n");
}

/// The variant of `Element` for a pointer: `Any` if it points to structures.
fn element(pointer: &Parameter) -> &'static str {
    TYPES.iter().find(|(cuda, ..)| *cuda == pointer.class).map_or("Any", |(.., element)| element)
}

/// A CUDA file that includes `kernels/<name>.cu`. For each of the file's `structures` that the host fills (those in `LAYOUTS`), it asserts
/// that the memory layout in CUDA is that in Rust.
pub fn unit(name: &str, structures: &[&str]) -> String {
    let mut code = format!("#include <cstddef>\n#include \"kernels/{name}.cu\"\n");
    for layout in LAYOUTS {
        let class = layout.name;
        if !structures.contains(&class.split('<').next().unwrap_or(class)) {
            continue;
        }
        let (size, alignment) = (layout.size, layout.alignment);
        let reason = format!("{class} differs from the structure in src/structs.rs");
        let _ = writeln!(
            code,
            "static_assert(sizeof({class}) == {size} && alignof({class}) == {alignment}, \"{reason}\");"
        );
        for (field, offset, size) in layout.fields {
            let at = format!("offsetof({class}, {field}) == {offset} && sizeof({class}::{field}) == {size}");
            let _ = writeln!(code, "static_assert({at}, \"{reason} at {field}\");");
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signature::parse;

    /// A file with kernels that have these heads: name and parameters.
    fn source(heads: &[&str]) -> Source {
        let head = |head: &&str| parse(&format!("__attribute__((global)) void {head}")).expect("a signature");
        Source { name: "file".to_owned(), signatures: heads.iter().map(head).collect() }
    }

    #[test]
    fn kernels_with_the_same_arguments_share_a_structure() {
        let code = module(&source(&[
            "add_one_f16(__half *y, const __half *x, uint64_t count, Strides strides)",
            "add_one_f32(float *y, const float *x, uint64_t count, Strides strides)",
            "add_two_f32(float *y, const float *x, uint64_t count, Strides strides)",
            "add_any_f32(float *y, const float *x, uint32_t count, Mask<float> mask)",
        ]));
        let code = code.expect("bindings");
        for part in [
            "pub struct AddOne {\npub y: Mut,\npub x: Const,\npub count: u64,\npub strides: structs::Strides,\n}",
            "pub type AddTwo = AddOne;",
            "const KERNELS: &'static [&'static Kernel<Self>] = &[&ADD_ONE, &ADD_TWO];",
            "to(&mut [place(&self.y.address), place(&self.x.address), place(&self.count), place(&self.strides)], \
             &[self.y.element, self.x.element])",
            "Variant { dtypes: &[\"f16\"], pointers: &[(\"y\", Element::F16), (\"x\", Element::F16)] },",
            "pub struct AddAny {\npub y: Mut,\npub x: Const,\npub count: u32,\npub mask: structs::Mask,\n}",
        ] {
            assert!(code.contains(part), "{part} is not in {code}");
        }
    }

    #[test]
    fn unsupported_signatures_are_rejected() {
        for (heads, reason) in [
            (
                vec!["f_f32(float *x, uint32_t n)", "f_f16(__half *x, uint64_t n)"],
                "f_f32 and f_f16 take different arguments",
            ),
            (vec!["f_f16(__half value)"], "f_f16 takes __half value by value"),
            (vec!["f(Unknown value)"], "src/structs.rs does not have"),
            (vec!["f(const Unknown *values)"], "src/structs.rs does not have"),
        ] {
            let error = module(&source(&heads)).expect_err("no bindings");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_layouts_of_the_structures_in_a_file_are_asserted() {
        let code = unit("file", &["Strides", "Strided"]);
        // `Strides` has three u64. `Strided<4>` has a u64, two u32, and 8 sizes and 4 x 8 strides of type u64.
        for part in [
            "#include \"kernels/file.cu\"",
            "static_assert(sizeof(Strides) == 24 && alignof(Strides) == 8,",
            "static_assert(offsetof(Strides, row) == 16 && sizeof(Strides::row) == 8,",
            "static_assert(sizeof(Strided<4>) == 336 && alignof(Strided<4>) == 8,",
        ] {
            assert!(code.contains(part), "{part} is not in {code}");
        }
        // A structure that the host fills, but not for this file.
        assert!(!code.contains("Settings"), "{code}");
    }
}
