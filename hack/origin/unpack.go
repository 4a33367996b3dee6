package main

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
)

// unpack puts the files of a tar that we made ourselves into dir.
func unpack(file, dir string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for tr := tar.NewReader(f); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := root.MkdirAll(filepath.Dir(h.Name), 0o755); err != nil {
			return err
		}
		if err := write(root, h.Name, tr); err != nil {
			return err
		}
	}
}

func write(root *os.Root, name string, r io.Reader) error {
	out, err := root.Create(name)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, r)
	return errors.Join(err, out.Close())
}
