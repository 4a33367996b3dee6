package guestagent

import (
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// envFileBytes is the largest file that variables are read from.
const envFileBytes = 64 << 10

// valueIn returns the value that text, a file of variables, gives to key; "": it gives none. Like the kubelet, it reads no further
// than that. Lines have the form KEY='value', with spaces before it, and spaces and a # comment after it. A value has no escapes and
// may go over several lines. Lines that are empty or begin with # are skipped. KEY= and a space begin an empty value.
func valueIn(text, key string) (string, error) {
	lines := strings.Split(text, "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	for i := 0; i < len(lines); i++ {
		line := strings.TrimLeft(strings.TrimSuffix(lines[i], "\r"), " \t")
		if line == "" || line[0] == '#' {
			continue
		}
		name, rest, found := strings.Cut(line, "=")
		switch {
		case !found:
			return "", errdefs.Invalidf("line %d has no =", i+1)
		case strings.Trim(name, " \t") == "":
			return "", errdefs.Invalidf("line %d has no name", i+1)
		case strings.TrimRight(name, " \t") != name:
			return "", errdefs.Invalidf("line %d has a space before =", i+1)
		case strings.HasPrefix(rest, " ") || strings.HasPrefix(rest, "\t"):
			if name == key {
				return "", nil
			}
			continue
		case !strings.HasPrefix(rest, "'"):
			return "", errdefs.Invalidf("line %d has a value that is not in single quotes", i+1)
		}
		begin := i
		var value strings.Builder
		part, after, closed := strings.Cut(rest[1:], "'")
		for ; !closed; part, after, closed = strings.Cut(strings.TrimSuffix(lines[i], "\r"), "'") {
			value.WriteString(part + "\n")
			if i++; i == len(lines) {
				return "", errdefs.Invalidf("line %d begins a value that does not end", begin+1)
			}
		}
		value.WriteString(part)
		if after = strings.TrimLeft(after, " \t"); after != "" && after[0] != '#' {
			return "", errdefs.Invalidf("line %d has text after the value", i+1)
		}
		if name == key {
			return value.String(), nil
		}
	}
	return "", nil
}
