//! Signatures of kernels, read from preprocessed CUDA. The build generates the code that launches the kernels from them.

use std::collections::BTreeSet;

/// A kernel.
#[derive(Debug, PartialEq)]
pub struct Signature {
    pub name: String,
    pub parameters: Vec<Parameter>,
}

/// A parameter of a kernel.
#[derive(Debug, PartialEq)]
pub struct Parameter {
    pub name: String,
    /// The type of a value, or the type that a pointer points to, without `const`.
    pub class: String,
    pub pointer: Option<Pointer>,
}

/// Whether a kernel writes through a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointer {
    Const,
    Mut,
}

/// The text between `extern "C"` and the body of each kernel, as one line for each kernel.
///
/// # Errors
/// Names a kernel whose first statement is neither `follow();` nor `follow_after(...)`. These wait for
/// the kernels before it. On new GPUs a kernel may start while they still run, so without the wait it could read its
/// operands before they are written.
pub fn heads(preprocessed: &str) -> Result<Vec<String>, String> {
    const LINKAGE: &str = "extern \"C\"";
    const FIRST: [&str; 2] = ["follow();", "follow_after("];
    let code: String =
        preprocessed.lines().filter(|line| !line.starts_with('#')).flat_map(|line| [line, " "]).collect();
    let mut heads = Vec::new();
    for after in code.split(LINKAGE).skip(1) {
        let (head, body) = after.split_at(after.find(['{', ';']).unwrap_or(after.len()));
        if !head.contains("__attribute__((global))") {
            continue;
        }
        let head = head.split_whitespace().collect::<Vec<_>>().join(" ");
        let starts = |body: &str| FIRST.iter().any(|first| body.trim_start().starts_with(first));
        // A declaration has no body to check: its `body` begins with `;`.
        if body.strip_prefix('{').is_some_and(|body| !starts(body)) {
            return Err(format!("expected {} first in the body (include/follow.cuh says why): {head}", FIRST[0]));
        }
        heads.push(head);
    }
    Ok(heads)
}

/// The names of all structures: the distinct names after `struct`, except those that start with `__`.
pub fn structures(preprocessed: &str) -> BTreeSet<&str> {
    let starts = preprocessed.match_indices("struct ").map(|(at, word)| &preprocessed[at + word.len()..]);
    starts.map(first_name).filter(|name| !name.is_empty() && !name.starts_with("__")).collect()
}

/// The name that `code` starts with, after an optional `alignas(...)`.
fn first_name(code: &str) -> &str {
    let aligned = code.strip_prefix("alignas(").and_then(|aligned| aligned.split_once(") "));
    let name = aligned.map_or(code, |(_, name)| name);
    name.find(|c: char| !is_of_name(c)).map_or(name, |end| &name[..end])
}

/// Parses one of the lines that [`heads`] returns.
pub fn parse(head: &str) -> Result<Signature, String> {
    let code = without_attributes(head);
    let (name, parameters) = code.split_once('(').ok_or_else(|| format!("no parameter list in: {head}"))?;
    let name = name.trim().strip_prefix("void ").ok_or_else(|| format!("must return void: {head}"))?.trim().to_owned();
    let parameters = parameters.trim().strip_suffix(')').ok_or_else(|| format!("no closing parenthesis in: {head}"))?;
    let parameters =
        split(parameters).into_iter().map(|parameter| self::parameter(&name, parameter)).collect::<Result<_, _>>()?;
    Ok(Signature { name, parameters })
}

fn parameter(kernel: &str, text: &str) -> Result<Parameter, String> {
    let text = text.replace("__restrict__", " ");
    let text = text.trim();
    let name = &text[text.rfind(|c: char| !is_of_name(c)).map_or(0, |at| at + 1)..];
    let class = text[..text.len() - name.len()].trim();
    if name.is_empty() || class.is_empty() {
        return Err(format!("a parameter of {kernel} has no name: {text}; name it"));
    }
    let (class, pointer) = match class.split_once('*') {
        Some((class, "")) => {
            let is_const = class.split_whitespace().any(|word| word == "const");
            (class, Some(if is_const { Pointer::Const } else { Pointer::Mut }))
        }
        Some(_) => return Err(format!("{kernel}: expected a plain pointer, such as `const T *x`, found: {text}")),
        None => (class, None),
    };
    let class = class.split_whitespace().filter(|&word| word != "const").collect::<Vec<_>>().join(" ");
    Ok(Parameter { name: name.to_owned(), class: arithmetic(&class), pointer })
}

/// A type with each `Acc<T>` replaced by the type in which kernels compute with values of `T`.
fn arithmetic(class: &str) -> String {
    let mut class = class.to_owned();
    for (narrow, wide) in [("float", "float"), ("double", "double"), ("__half", "float"), ("__nv_bfloat16", "float")] {
        class = class.replace(&format!("Acc<{narrow}>"), wide);
    }
    class
}

fn without_attributes(code: &str) -> String {
    let mut parts = code.split("__attribute__((");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        // An attribute ends where both of its opening parentheses are closed.
        let mut depth = 2;
        let end = part.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        });
        kept.push_str(&part[end.map_or(part.len(), |end| end + 1)..]);
    }
    kept
}

/// Splits a list at the commas that are outside brackets.
fn split(list: &str) -> Vec<&str> {
    let mut depth = 0;
    let is_between = |c: char| {
        depth += i32::from("(<".contains(c)) - i32::from(")>".contains(c));
        c == ',' && depth == 0
    };
    list.split(is_between).filter(|item| !item.trim().is_empty()).collect()
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, class: &str, pointer: Option<Pointer>) -> Parameter {
        Parameter { name: name.to_owned(), class: class.to_owned(), pointer }
    }

    #[test]
    fn the_name_and_the_parameters_of_a_kernel_are_parsed() {
        let code = "# 1 \"a.cu\"\nextern \"C\" int puts(const char *);\nextern \"C\" __attribute__((global)) void\n\
                    __attribute__((launch_bounds((128), 2))) __attribute__((cluster_dims(2, 1, 1)))\n\
                    pair_f16(const __half *__restrict__ x, Acc<__half> *sum, void const *ids, int64_t last,\n\
                    const __attribute__((grid_constant)) Pair<Acc<__half>, 2> pair) { follow(); if (x) return; }";
        let heads = heads(code).expect("heads");
        assert_eq!(heads.len(), 1);
        let parameters = vec![
            of("x", "__half", Some(Pointer::Const)),
            of("sum", "float", Some(Pointer::Mut)),
            of("ids", "void", Some(Pointer::Const)),
            of("last", "int64_t", None),
            of("pair", "Pair<float, 2>", None),
        ];
        assert_eq!(parse(&heads[0]), Ok(Signature { name: "pair_f16".to_owned(), parameters }));
    }

    #[test]
    fn kernels_that_do_not_wait_for_those_before_them_are_rejected() {
        let error = heads("extern \"C\" __attribute__((global)) void early(int *x) { *x = 0; follow(); }").unwrap_err();
        assert!(error.contains("early"), "{error}");
    }

    #[test]
    fn unnamed_parameters_and_unusual_pointers_are_rejected() {
        for (parameters, reason) in
            [("float *x, uint64_t", "no name"), ("float **x", "plain"), ("float *const x", "plain")]
        {
            let error = parse(&format!("__attribute__((global)) void f({parameters})")).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn structures_are_found() {
        let code =
            "struct A { int a; };\ntemplate <int K> struct B { int b[K]; };\nstruct alignas(16) C { struct A a; };";
        assert_eq!(structures(code), BTreeSet::from(["A", "B", "C"]));
    }
}
