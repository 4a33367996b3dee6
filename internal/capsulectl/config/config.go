// Package config keeps what an operator's program knows between calls: the appliances that it can reach, and the operator's key.
//
// The files are those of the documented system, so that its program can use them too. The package connects to nothing.
package config

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
)

// DefaultPort is where appliances serve.
const DefaultPort = "50000"

// Context is an appliance that this operator has adopted, or whose key it has.
type Context struct {
	Addr           string `yaml:"addr" json:"addr"` // host:port
	CapsuleID      string `yaml:"capsule_id" json:"capsule_id"`
	TLSFingerprint string `yaml:"tls_fingerprint_sha256" json:"tls_fingerprint_sha256"`
	KeyPath        string `yaml:"key_path" json:"key_path"` // of the operator's key
}

// Config is the content of config.yaml.
type Config struct {
	Current  string             `yaml:"current"` // name of a context; "": none
	Contexts map[string]Context `yaml:"contexts"`
}

// Dir returns the folder of the files: CAPSULE_CONFIG_DIR, or ~/.config/capsule.
func Dir(getenv func(string) string) (string, error) {
	if dir := getenv("CAPSULE_CONFIG_DIR"); dir != "" {
		return dir, nil
	}
	home := getenv("HOME")
	if home == "" {
		return "", errdefs.Invalidf("neither HOME nor CAPSULE_CONFIG_DIR is set; set one, so that contexts and the key have a place")
	}
	return filepath.Join(home, ".config", "capsule"), nil
}

// Load reads the file in dir. Without one, there are no contexts. Errors: InvalidArgument for a file that is not as documented.
func Load(dir string) (Config, error) {
	path := filepath.Join(dir, "config.yaml")
	c := Config{Contexts: map[string]Context{}}
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return c, nil
	case err != nil:
		return c, errdefs.New(errdefs.Internal, "read the contexts: %w", err)
	}
	if err := yaml.Unmarshal(data, &c); err != nil {
		return c, errdefs.New(errdefs.InvalidArgument, "%s is damaged; repair it, or move it away and adopt again: %w", path, err)
	}
	if c.Contexts == nil {
		c.Contexts = map[string]Context{}
	}
	return c, nil
}

// lock makes dir, and lets one process after the other change what is in it.
func lock(ctx context.Context, dir string) (io.Closer, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errdefs.New(errdefs.Internal, "keep contexts and key: %w", err)
	}
	l, err := filelock.Take(ctx, filepath.Join(dir, ".lock"))
	if err != nil {
		return nil, fmt.Errorf("keep contexts and key: %w", err)
	}
	return l, nil
}

// Update changes the file in dir. Changes at the same time follow one another. If change fails, nothing is changed.
func Update(ctx context.Context, dir string, change func(*Config) error) error {
	l, err := lock(ctx, dir)
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := Load(dir)
	if err != nil {
		return err
	}
	if err := change(&c); err != nil {
		return err
	}
	data, err := yaml.Marshal(c)
	if err != nil {
		return errdefs.New(errdefs.Internal, "keep the contexts: %w", err)
	}
	if err := atomicfile.WriteFile(filepath.Join(dir, "config.yaml"), data, 0o600); err != nil {
		return errdefs.New(errdefs.Internal, "keep the contexts: %w", err)
	}
	return nil
}

// Resolve finds the context that target means: a name, or the address of one. Without a target it is the current context. Errors:
// NotFound with the remedy.
func (c Config) Resolve(target string) (string, Context, error) {
	wanted := cmp.Or(target, c.Current)
	if wanted == "" {
		return "", Context{}, errdefs.NotFoundf("no machine is named: use --capsule NAME, set CAPSULE_HOST, or choose one with `capsulectl context use NAME`; " +
			"`capsulectl adopt --capsule HOST` makes the first context")
	}
	if x, ok := c.Contexts[wanted]; ok {
		return wanted, x, nil
	}
	for name, x := range c.Contexts {
		if x.Addr == WithPort(wanted) {
			return name, x, nil
		}
	}
	if target == "" {
		return "", Context{}, errdefs.NotFoundf("the current context %q is not there any more; choose another with `capsulectl context use NAME`", wanted)
	}
	return "", Context{}, errdefs.NotFoundf("there is no context %q (`capsulectl context list` has all); if it is a new machine, run: capsulectl adopt --capsule %s", wanted, wanted)
}

// WithPort returns addr with the default port, if it has none.
func WithPort(addr string) string {
	if _, _, err := net.SplitHostPort(addr); err == nil || addr == "" {
		return addr
	}
	if len(addr) > 1 && addr[0] == '[' && addr[len(addr)-1] == ']' {
		addr = addr[1 : len(addr)-1]
	}
	return net.JoinHostPort(addr, DefaultPort)
}
