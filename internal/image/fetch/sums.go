package fetch

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"path"
	"regexp"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxSums is the maximum size of a checksum file.
const maxSums = 1 << 20

// listed returns the digest of l from the checksum file at raw. want is a digest that was also required; both must agree.
func (s *session) listed(ctx context.Context, raw string, l location, want string) (string, error) {
	at, err := parseURL(raw)
	if err != nil {
		return "", fmt.Errorf("fetch %s: its checksums: %w", l, err)
	}
	if at.who == nil && at.sameOrigin(l) {
		at.who = l.who
	}
	text, err := s.small(ctx, at)
	if err != nil {
		return "", fmt.Errorf("fetch %s: its checksums: %w", l, err)
	}
	name := l.base()
	digest, err := lookup(text, name)
	if err != nil {
		return "", fmt.Errorf("fetch %s: its checksums %s: %w", l, at, err)
	}
	if want != "" && want != digest {
		return "", mismatch(l, want, digest)
	}
	return digest, nil
}

// small fetches a whole small file.
func (s *session) small(ctx context.Context, l location) ([]byte, error) {
	b := &Body{s: s, ctx: ctx, cancel: func() {}, from: l, size: -1, pauses: s.c.opts.pauses()}
	defer b.Close()
	if err := b.connect(ctx, validators{}, nil); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(b, maxSums+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxSums {
		return nil, errdefs.Preconditionf("fetch %s: it is larger than %d bytes, too large for a checksum file", l, maxSums)
	}
	return text, nil
}

// The two styles: "HEX  NAME" of sha256sum (a '*' before NAME marks binary mode, a '\' before HEX an escaped name), and
// "SHA256 (NAME) = HEX" of BSD.
var (
	gnuLine = regexp.MustCompile(`^(\\?)([0-9A-Fa-f]{64}) [ *](.+)$`)
	bsdLine = regexp.MustCompile(`^SHA256 ?\((.+)\) ?= ?([0-9A-Fa-f]{64})$`)
)

// lookup finds the digest of the file called name, in any folder. It ignores other lines, such as comments, signatures and
// other algorithms.
func lookup(text []byte, name string) (string, error) {
	found := ""
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, maxSums+1)
	for lines.Scan() {
		digest, file := sumLine(strings.TrimSuffix(lines.Text(), "\r"))
		if digest == "" || path.Base(file) != name {
			continue
		}
		if found != "" && found != digest {
			return "", errdefs.Preconditionf("it lists %q twice, with different digests", name)
		}
		found = digest
	}
	if err := lines.Err(); err != nil {
		return "", errdefs.Preconditionf("it cannot be read: %w", err)
	}
	if found == "" {
		return "", errdefs.Preconditionf("it does not list %q", name)
	}
	return found, nil
}

var unescape = strings.NewReplacer(`\\`, `\`, `\n`, "\n", `\r`, "\r")

func sumLine(line string) (digest, file string) {
	if m := gnuLine.FindStringSubmatch(line); m != nil {
		file = m[3]
		if m[1] != "" {
			file = unescape.Replace(file)
		}
		return strings.ToLower(m[2]), file
	}
	if m := bsdLine.FindStringSubmatch(line); m != nil {
		return strings.ToLower(m[2]), m[1]
	}
	return "", ""
}
