package bootctl

import (
	"bytes"
	"fmt"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// The environment block of GRUB: a first line, lines NAME=VALUE, and # up to its size.
const (
	Size   = 1024 // bytes of the file, which neither GRUB nor we ever change
	sector = 512  // bytes that a disk writes whole or not at all
	header = "# GRUB Environment Block\n"
	maxID  = 40 // bytes; three of them and the rest of our lines fit into a sector
	noTry  = "-"
)

// NewBlock returns the bytes of a block of an installation: slot a is good, and both slots have the boot files of id.
func NewBlock(id string) ([]byte, error) {
	if id == "" || !validID(id) {
		return nil, errdefs.Invalidf("the id %q is not 1 to %d small letters, digits, dots, hyphens and underscores", id, maxID)
	}
	return encode(State{Good: A, Files: Files{A: id, B: id}}, nil)
}

// encode returns the block of s. Our lines come first, so that they are in the first sector.
func encode(s State, foreign []string) ([]byte, error) {
	try := string(s.Try)
	if s.Try == None {
		try = noTry
	}
	var b strings.Builder
	b.WriteString(header)
	fmt.Fprintf(&b, "good=%s\ntry=%s\ntries=%d\nfiles_a=%s\nfiles_b=%s\nuid=%s\n", s.Good, try, s.Tries, s.Files.A, s.Files.B, s.UID)
	for _, line := range foreign {
		b.WriteString(line + "\n")
	}
	if b.Len() > Size {
		return nil, errdefs.Exhaustedf("the boot environment is full; remove variables of others with grub-editenv")
	}
	return append([]byte(b.String()), bytes.Repeat([]byte("#"), Size-b.Len())...), nil
}

// decode returns the state in a block, and those of its lines that are not ours.
func decode(b []byte) (s State, foreign []string, err error) {
	if len(b) != Size {
		return s, nil, fmt.Errorf("it has %d bytes instead of %d", len(b), Size)
	}
	text, ok := strings.CutPrefix(string(b), header)
	if !ok {
		return s, nil, fmt.Errorf("its first line is not %q", strings.TrimSpace(header))
	}
	had := map[string]bool{}
	for strings.Trim(text, "#") != "" {
		if comment, rest, ok := strings.Cut(text, "\n"); ok && text[0] == '#' {
			foreign, text = append(foreign, comment), rest
			continue
		}
		line, rest, ok := cutLine(text)
		if !ok {
			return s, nil, fmt.Errorf("its last line has no end")
		}
		text = rest
		name, value, ok := strings.Cut(line, "=")
		if !ok {
			return s, nil, fmt.Errorf("the line %q has no value", line)
		}
		if had[name] {
			return s, nil, fmt.Errorf("it has %s twice", name)
		}
		had[name] = true
		ours, err := s.take(name, value)
		if err != nil {
			return s, nil, err
		}
		if !ours {
			foreign = append(foreign, line)
		}
	}
	return s, foreign, s.check()
}

// cutLine splits off the first line. As for GRUB, a backslash keeps the byte after it, a line feed too, from ending the line.
func cutLine(text string) (line, rest string, ok bool) {
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '\n':
			return text[:i], text[i+1:], true
		}
	}
	return "", "", false
}

// take sets the variable name, if it is ours.
func (s *State) take(name, value string) (ours bool, err error) {
	switch name {
	case "good":
		s.Good, err = slotOf(name, value)
	case "try":
		if value != noTry {
			s.Try, err = slotOf(name, value)
		}
	case "tries":
		if len(value) != 1 || value[0] < '0' || value[0] > '0'+MaxTries {
			return true, fmt.Errorf("tries is %q", value)
		}
		s.Tries = int(value[0] - '0')
	case "files_a":
		s.Files.A, err = idOf(name, value)
	case "files_b":
		s.Files.B, err = idOf(name, value)
	case "uid":
		s.UID, err = idOf(name, value)
	default:
		return false, nil
	}
	return true, err
}

func (s *State) check() error {
	switch {
	case s.Good == None:
		return fmt.Errorf("it has no good slot")
	case s.Try == s.Good:
		return fmt.Errorf("the good slot is on trial")
	case s.Try == None && s.Tries != 0:
		return fmt.Errorf("it has tries of no slot")
	}
	return nil
}

func slotOf(name, value string) (Slot, error) {
	if s := Slot(value); s == A || s == B {
		return s, nil
	}
	return None, fmt.Errorf("%s is %q", name, value)
}

func idOf(name, value string) (string, error) {
	if !validID(value) {
		return "", fmt.Errorf("%s is %q", name, value)
	}
	return value, nil
}

// validID reports whether s can stand in a block, a file name of FAT and a command line of a kernel as it is. FAT does not tell letters of
// two cases apart, so there is one.
func validID(s string) bool {
	return len(s) <= maxID && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789._-") == "" && !strings.HasSuffix(s, ".")
}
