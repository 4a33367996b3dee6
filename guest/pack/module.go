package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// collect copies the wanted modules and their dependencies from the tree of a kernel package to out, and writes
// out/modules.dep: one line per module, with its name and then all modules to load before it, in order.
func collect(tree, out string) error {
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
	for _, m := range optional {
		if _, ok := found[m]; ok {
			if err := resolve(m, found, deps, nil); err != nil {
				return err
			}
		}
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	var list strings.Builder
	for _, m := range sorted(deps) {
		data, err := os.ReadFile(found[m])
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(out, m+".ko"), unsign(data), 0o644); err != nil {
			return err
		}
		fmt.Fprintln(&list, strings.Join(append([]string{m}, deps[m]...), " "))
	}
	return os.WriteFile(filepath.Join(out, "modules.dep"), []byte(list.String()), 0o644)
}

// find maps module names (with underscores, as in modinfo) to files below tree.
func find(tree string) (map[string]string, error) {
	found := map[string]string{}
	err := filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := d.Name()
		if strings.HasSuffix(base, ".ko.xz") || strings.HasSuffix(base, ".ko.zst") {
			return fmt.Errorf("%s is compressed: this kernel package is not understood", base)
		}
		if name, ok := strings.CutSuffix(base, ".ko"); ok {
			found[strings.ReplaceAll(name, "-", "_")] = path
		}
		return nil
	})
	return found, err
}

// resolve fills deps[name] with everything that name needs, in load order. path is the chain of modules that led here.
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
	direct, err := depends(file)
	if err != nil {
		return fmt.Errorf("read module %s: %w", name, err)
	}
	all := []string{}
	for _, d := range direct {
		if err := resolve(d, found, deps, append(path, name)); err != nil {
			return err
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
	f, err := elf.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
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
