//! The `generation` tag, which transformers adds to Jinja to find an answer's tokens for training.
//!
//! `{% generation %}...{% endgeneration %}` prints its body and opens a scope. The template engine has no such tag, so it
//! is spelled `{% with %}...{% endwith %}`, which prints its body and opens a scope; dashes and pluses stay as they are.

/// The template with every `generation` tag respelled. Text, comments, `raw` blocks and strings are left alone.
pub(super) fn respell(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (text, from) = rest.split_at(at);
        out.push_str(text);
        let (tag, after) = match from.as_bytes().get(1) {
            Some(b'#') => split_after(from, from.find("#}").map(|end| end + 2)),
            Some(b'{') => split_after(from, end_of_tag(from, "}}")),
            Some(b'%') => split_after(from, end_of_tag(from, "%}")),
            _ => split_after(from, Some(1)),
        };
        if from.starts_with("{%") {
            let inner = tag.get(2..tag.len().saturating_sub(2)).unwrap_or_default();
            let word = inner.trim_start_matches(['-', '+']).trim().trim_end_matches(['-', '+']).trim();
            match word {
                "raw" => {
                    // Inside a raw block nothing is a tag but its end.
                    let (inside, behind) = split_after(after, end_of_raw(after));
                    out.extend([tag, inside]);
                    rest = behind;
                    continue;
                }
                "generation" => {
                    out.push_str(&tag.replacen("generation", "with", 1));
                    rest = after;
                    continue;
                }
                "endgeneration" => {
                    out.push_str(&tag.replacen("endgeneration", "endwith", 1));
                    rest = after;
                    continue;
                }
                _ => {}
            }
        }
        out.push_str(tag);
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Splits at `end`; all of it belongs to a tag that never ends.
fn split_after(text: &str, end: Option<usize>) -> (&str, &str) {
    text.split_at_checked(end.unwrap_or(text.len())).unwrap_or((text, ""))
}

/// Where a raw block's closing tag ends, in the text behind the opening one.
fn end_of_raw(text: &str) -> Option<usize> {
    text.match_indices("{%").find_map(|(at, _)| {
        let inner = text.get(at + 2..)?;
        let tail = inner.trim_start_matches(['-', '+']).trim_start().strip_prefix("endraw")?;
        let close = tail.trim_start().trim_start_matches(['-', '+']).strip_prefix("%}")?;
        Some(text.len() - close.len())
    })
}

/// Where the tag that `text` begins with ends, strings inside it skipped.
fn end_of_tag(text: &str, close: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(q) if c == q => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if text.get(at..).is_some_and(|t| t.starts_with(close)) => return Some(at + close.len()),
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::respell;

    #[test]
    fn tags_are_respelled_with_their_dashes() {
        assert_eq!(respell("a{% generation %}b{% endgeneration %}c"), "a{% with %}b{% endwith %}c");
        assert_eq!(respell("{%- generation -%}b{%+endgeneration+%}"), "{%- with -%}b{%+endwith+%}");
    }

    #[test]
    fn everything_else_is_left_alone() {
        for text in [
            "",
            "{",
            "no tags, generation",
            "{{ '{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% if generation %}x{% endif %}",
            "{{ \"}}\" }}{% set generation = 1 %}",
            "{% generation",
            "{{ never closed {% generation %}",
            "ü{% if 'ü' %}ü{% endif %}",
        ] {
            assert_eq!(respell(text), text);
        }
        assert_eq!(respell("{% raw %}{{{% endraw %}{% generation %}"), "{% raw %}{{{% endraw %}{% with %}");
    }
}
