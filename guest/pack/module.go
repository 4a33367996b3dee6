package main

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/image/compress"
)

// builtIn stands for the file of a module that is part of the kernel.
const builtIn = ""

// collect copies modules and their dependencies from the tree of a kernel package to the folder out. A wanted module must exist; an optional
// or a rare one may be missing. collect also writes out/modules.dep, with one line per module: its name, and then all modules to load before
// it, in order. Modules that only rare ones need are compressed with gzip.
func collect(tree, out string, wanted, optional, rare []string) error {
	found, err := find(tree)
	if err != nil {
		return err
	}
	deps := map[string][]string{}
	for _, m := range wanted {
		if err := resolve(m, found, deps, nil); err != nil {
			return err
		}
	}
	common := map[string]bool{}
	for _, list := range [][]string{optional, rare} {
		for m := range deps {
			common[m] = true
		}
		for _, m := range list {
			if _, ok := found[m]; ok {
				if err := resolve(m, found, deps, nil); err != nil {
					return err
				}
			}
		}
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	var list strings.Builder
	for _, m := range sorted(deps) {
		data, err := read(found[m])
		if err != nil {
			return err
		}
		name := m + ".ko"
		if data = unsign(data); !common[m] {
			name += ".gz"
			if data, err = pack(data); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(out, name), data, 0o644); err != nil {
			return err
		}
		fmt.Fprintln(&list, strings.Join(append([]string{m}, deps[m]...), " "))
	}
	return os.WriteFile(filepath.Join(out, "modules.dep"), []byte(list.String()), 0o644)
}

// pack compresses data with gzip. The same data gives the same result.
func pack(data []byte) ([]byte, error) {
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := z.Write(data); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// find maps the names of modules (with underscores, as in modinfo) to files below tree, or to builtIn.
func find(tree string) (map[string]string, error) {
	found := map[string]string{}
	err := filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name, ok := moduleName(d.Name()); ok {
			found[name] = path
		}
		if d.Name() != "modules.builtin" {
			return nil
		}
		list, err := os.ReadFile(path)
		for line := range strings.Lines(string(list)) {
			if name, ok := moduleName(filepath.Base(strings.TrimSpace(line))); ok {
				found[name] = builtIn
			}
		}
		return err
	})
	return found, err
}

// moduleName returns the name of the module in a file, which may be compressed.
func moduleName(file string) (name string, ok bool) {
	name, rest, ok := strings.Cut(file, ".ko")
	return strings.ReplaceAll(name, "-", "_"), ok && slices.Contains([]string{"", ".xz", ".zst"}, rest)
}

// read returns what a module's file holds, decompressed.
func read(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	plain, _, err := compress.Reader(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	defer plain.Close()
	data, err := io.ReadAll(plain)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return data, nil
}

// resolve fills deps[name] with everything that name needs, in load order, unless it is built in. path is the chain of modules that
// led here.
func resolve(name string, found map[string]string, deps map[string][]string, path []string) error {
	if _, done := deps[name]; done {
		return nil
	}
	if slices.Contains(path, name) {
		return fmt.Errorf("modules depend on each other in a circle: %s", strings.Join(append(path, name), " -> "))
	}
	file, ok := found[name]
	if !ok {
		return fmt.Errorf("the kernel package has no module %s", name)
	}
	if file == builtIn {
		return nil
	}
	direct, err := depends(file)
	if err != nil {
		return fmt.Errorf("read module %s: %w", name, err)
	}
	all := []string{}
	for _, d := range direct {
		if err := resolve(d, found, deps, append(path, name)); err != nil {
			return err
		}
		if found[d] == builtIn {
			continue
		}
		for _, need := range append(slices.Clone(deps[d]), d) {
			if !slices.Contains(all, need) {
				all = append(all, need)
			}
		}
	}
	deps[name] = all
	return nil
}

// depends reads a module's dependencies from its .modinfo section.
func depends(file string) ([]string, error) {
	data, err := read(file)
	if err != nil {
		return nil, err
	}
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errors.New("it has no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	for _, kv := range bytes.Split(info, []byte{0}) {
		if list, ok := bytes.CutPrefix(kv, []byte("depends=")); ok && len(list) > 0 {
			return strings.Split(strings.ReplaceAll(string(list), "-", "_"), ","), nil
		}
	}
	return nil, nil
}

func sorted(deps map[string][]string) []string {
	var names []string
	for n := range deps {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// The trailer of a signed module: signature, struct module_signature (12 bytes, the last 4 its length), magic.
const signMagic = "~Module signature appended~\n"

// unsign removes a module's signature. Checking RSA signatures costs an emulated guest 0.06 s of its boot. It proves nothing
// here: anyone who can change a module in the initramfs can also change the kernel next to it.
func unsign(module []byte) []byte {
	body, ok := bytes.CutSuffix(module, []byte(signMagic))
	if !ok || len(body) < 12 {
		return module
	}
	length := int(binary.BigEndian.Uint32(body[len(body)-4:]))
	if length < 0 || length > len(body)-12 {
		return module
	}
	return body[:len(body)-12-length]
}
