package boot

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// modules loads kernel modules from a folder with a modules.dep, which lists each module and then the modules to load
// before it, in order.
type modules struct {
	dir    string
	deps   map[string][]string
	loaded map[string]bool
}

// openModules reads the list of modules. Without the folder, the kernel is assumed to have everything built in.
func openModules(dir string) (*modules, error) {
	m := &modules{dir: dir, deps: map[string][]string{}, loaded: map[string]bool{}}
	f, err := os.Open(filepath.Join(dir, "modules.dep"))
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the list of modules: %w", err)
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		if words := strings.Fields(scan.Text()); len(words) > 0 {
			m.deps[words[0]] = words[1:]
		}
	}
	return m, scan.Err()
}

// load loads the named modules and their dependencies. A name that is not in the list is built in or unavailable.
func (m *modules) load(names ...string) error {
	for _, file := range m.files(names) {
		f, err := m.open(file)
		if err != nil {
			return fmt.Errorf("load module %s: %w", file, err)
		}
		if err := insert(f); err != nil {
			return fmt.Errorf("load module %s: %w", file, err)
		}
	}
	return nil
}

// prepare opens modules that must be loaded after their folder is removed, and returns the function that loads them.
func (m *modules) prepare(names ...string) (func() error, error) {
	var open []*os.File
	for _, file := range m.files(names) {
		f, err := m.open(file)
		if err != nil {
			return nil, fmt.Errorf("open module %s: %w", file, err)
		}
		open = append(open, f)
	}
	return func() error {
		var errs []error
		for _, f := range open {
			if err := insert(f); err != nil {
				errs = append(errs, fmt.Errorf("load module %s: %w", filepath.Base(f.Name()), err))
			}
		}
		return errors.Join(errs...)
	}, nil
}

// files lists the modules to load for names, in order, without those that were listed before.
func (m *modules) files(names []string) []string {
	var list []string
	for _, name := range names {
		deps, ok := m.deps[name]
		if !ok {
			continue
		}
		for _, file := range append(append([]string(nil), deps...), name) {
			if !m.loaded[file] {
				m.loaded[file] = true
				list = append(list, file)
			}
		}
	}
	return list
}

// packed is the end of the name of a module that is compressed with gzip, because few guests need it.
const packed = ".gz"

// open opens the file of a module.
func (m *modules) open(name string) (*os.File, error) {
	path := filepath.Join(m.dir, name+".ko")
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return os.Open(path + packed)
	}
	return f, err
}

// parameters are those of modules. The kernel would look for disks at 256 addresses of a SCSI adapter, which takes an emulated guest 200 ms;
// Rescan looks where the driver of the host plugs them.
var parameters = map[string]string{"scsi_mod": "scan=manual"}

// insert loads an open module and closes it.
func insert(f *os.File) error {
	defer f.Close()
	name, _, _ := strings.Cut(filepath.Base(f.Name()), ".")
	var err error
	if strings.HasSuffix(f.Name(), packed) {
		err = unpackInto(f, parameters[name])
	} else {
		err = unix.FinitModule(int(f.Fd()), parameters[name], 0)
	}
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

// unpackInto loads a compressed module.
func unpackInto(f *os.File, parameters string) error {
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	module, err := io.ReadAll(z)
	if err != nil {
		return err
	}
	return unix.InitModule(module, parameters)
}
