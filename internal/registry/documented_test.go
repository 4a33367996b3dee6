package registry_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
)

// These types and functions are the documented system's clients, written from its documents: they know the documented
// keys only, and drop all others.
type (
	docHeader struct {
		Version int           `json:"version"`
		Config  docTarContent `json:"config"`
	}
	docTarContent struct {
		ID           string              `json:"id"`
		Name         string              `json:"name"`
		Description  string              `json:"description"`
		Image        string              `json:"image"`
		ImageDigest  string              `json:"image_digest"`
		ImageType    string              `json:"image_type"`
		ImageBlobIDs map[string]struct{} `json:"image_blob_ids"`
		Hypervisor   string              `json:"hypervisor"`
		CPU          int                 `json:"cpu"`
		Memory       int64               `json:"memory"`
		Storage      int64               `json:"storage"`
		NICs         int                 `json:"nics"`
		Network      string              `json:"network"`
		Windows      bool                `json:"windows"`
	}
	docConfig struct {
		SchemaVersion string              `json:"schemaVersion"`
		SnapshotID    string              `json:"snapshotId"`
		Description   string              `json:"description"`
		Image         string              `json:"image"`
		ImageDigest   string              `json:"imageDigest"`
		ImageType     string              `json:"imageType"`
		ImageBlobIDs  map[string]struct{} `json:"imageBlobIds"`
		Hypervisor    string              `json:"hypervisor"`
		CPU           int                 `json:"cpu"`
		Memory        int64               `json:"memory"`
		Storage       int64               `json:"storage"`
		NICs          int                 `json:"nics"`
		Network       string              `json:"network"`
		Windows       bool                `json:"windows"`
		Files         map[string]docFile  `json:"files"`
		CreatedAt     time.Time           `json:"createdAt"`
	}
	docFile struct {
		Mode       int64    `json:"mode"`
		SparseMap  string   `json:"sparseMap,omitempty"`
		SparseSize int64    `json:"sparseSize,omitempty"`
		Size       int64    `json:"size,omitempty"`
		Chunks     []string `json:"chunks,omitempty"`
	}
)

const (
	docArtifact   = "application/vnd.cocoonstack.snapshot.v1+json"
	docArtifactV2 = "application/vnd.cocoonstack.snapshot.v2+json"
	docConfigType = "application/vnd.cocoonstack.snapshot.config.v1+json"
	docConfigMost = 1 << 20 // the first clients read no more of a config
	docTitle      = "org.opencontainers.image.title"
	docSparseMap  = "COCOON.sparse.map"
	docSparseSize = "COCOON.sparse.size"
)

func docMedia(file string) string {
	switch {
	case file == "config.json":
		return "application/vnd.cocoonstack.vm.config+json"
	case file == "memory-ranges":
		return "application/vnd.cocoonstack.vm.memory"
	case strings.HasSuffix(file, ".qcow2"):
		return "application/vnd.cocoonstack.disk.qcow2"
	case strings.HasSuffix(file, ".raw"):
		return "application/vnd.cocoonstack.disk.raw"
	}
	return "application/octet-stream"
}

// docPush walks an exported stream and makes each entry a layer; split also cuts and compresses each, as later clients
// do.
func docPush(r *rig, repo string, export []byte, split bool) {
	r.t.Helper()
	var head docHeader
	m := v1.Manifest{ArtifactType: docArtifact}
	files := map[string]docFile{}
	in := tar.NewReader(bytes.NewReader(export))
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			r.t.Fatal(err)
		}
		data, err := io.ReadAll(in)
		if err != nil {
			r.t.Fatal(err)
		}
		if h.Name == "snapshot.json" {
			if err := json.Unmarshal(data, &head); err != nil {
				r.t.Fatal(err)
			}
			continue
		}
		f := docFile{Mode: h.Mode, SparseMap: h.PAXRecords[docSparseMap]}
		if f.SparseMap != "" {
			if f.SparseSize, err = strconv.ParseInt(h.PAXRecords[docSparseSize], 10, 64); err != nil {
				r.t.Fatal(err)
			}
		}
		if !split || h.Name == "config.json" || len(data) < 2 {
			m.Layers = append(m.Layers, r.layer(repo, docMedia(h.Name), h.Name, data))
			files[h.Name] = f
			continue
		}
		m.ArtifactType, f.Size = docArtifactV2, int64(len(data))
		for n, part := range [][]byte{data[:len(data)/2], data[len(data)/2:]} {
			l := r.layer(repo, docMedia(h.Name)+"+zstd", h.Name, packed(r.t, part), n)
			l.Annotations["cocoonstack.chunk.count"] = "2"
			m.Layers, f.Chunks = append(m.Layers, l), append(f.Chunks, l.Digest.String())
		}
		files[h.Name] = f
	}
	c := head.Config
	config, err := json.Marshal(docConfig{
		SchemaVersion: "v1", SnapshotID: c.ID, Description: c.Description, Image: c.Image, ImageDigest: c.ImageDigest, ImageType: c.ImageType,
		ImageBlobIDs: c.ImageBlobIDs, Hypervisor: c.Hypervisor, CPU: c.CPU, Memory: c.Memory, Storage: c.Storage, NICs: c.NICs, Network: c.Network,
		Windows: c.Windows, Files: files, CreatedAt: time.Now().UTC(),
	})
	if err != nil || head.Version != 1 || len(config) > docConfigMost {
		r.t.Fatalf("version %d, a config of %d bytes, %v", head.Version, len(config), err)
	}
	m.Config = r.pushBlob(repo, config)
	m.Config.MediaType = docConfigType
	r.pushManifest(repo, "1", m)
}

// docPull returns a snapshot of whole files as the stream that an import gets. It accepts what the first clients do.
func docPull(r *rig, repo, tag, name string) []byte {
	r.t.Helper()
	blob := func(d v1.Descriptor) []byte {
		data := r.want(r.do("GET", "/v2/"+repo+"/blobs/"+d.Digest.String(), nil), 200).body
		if int64(len(data)) != d.Size || digest.FromBytes(data) != d.Digest {
			r.t.Fatalf("the blob %s has %d bytes", d.Digest, len(data))
		}
		return data
	}
	var m v1.Manifest
	if err := json.Unmarshal(r.want(r.do("GET", "/v2/"+repo+"/manifests/"+tag, nil), 200).body, &m); err != nil {
		r.t.Fatal(err)
	}
	if m.ArtifactType != docArtifact || m.Config.MediaType != docConfigType || m.Config.Size > docConfigMost {
		r.t.Fatalf("it is %s with the config %+v", m.ArtifactType, m.Config)
	}
	var c docConfig
	if err := json.Unmarshal(blob(m.Config), &c); err != nil {
		r.t.Fatal(err)
	}
	head, err := json.MarshalIndent(docHeader{1, docTarContent{
		ID: c.SnapshotID, Name: name, Description: c.Description, Image: c.Image, ImageDigest: c.ImageDigest, ImageType: c.ImageType,
		ImageBlobIDs: c.ImageBlobIDs, Hypervisor: c.Hypervisor, CPU: c.CPU, Memory: c.Memory, Storage: c.Storage, NICs: c.NICs, Network: c.Network, Windows: c.Windows,
	}}, "", "  ")
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add := func(h *tar.Header, data []byte) {
		h.Size, h.ModTime = int64(len(data)), time.Now()
		if err = errors.Join(err, w.WriteHeader(h)); err == nil {
			_, err = w.Write(data)
		}
	}
	add(&tar.Header{Name: "snapshot.json", Mode: 0o644}, append(head, '\n'))
	for _, l := range m.Layers {
		title := l.Annotations[docTitle]
		f := c.Files[title]
		if title == "" || f.SparseMap != "" && f.SparseSize <= 0 {
			r.t.Fatalf("the layer %+v with %+v", l, f)
		}
		h := &tar.Header{Name: title, Mode: 0o640}
		if f.SparseMap != "" {
			h.PAXRecords = map[string]string{docSparseMap: f.SparseMap, docSparseSize: strconv.FormatInt(f.SparseSize, 10)}
		}
		add(h, blob(l))
	}
	if err := errors.Join(err, w.Close()); err != nil {
		r.t.Fatal(err)
	}
	return out.Bytes()
}

// clonable checks that the snapshot name in s has the record and the files of source, and that disks are made of it.
func clonable(t *testing.T, s snapshot.Store, name string, source snapshot.Held) {
	t.Helper()
	got := hold(t, s, name)
	same(t, source, got)
	a, b := source.Snapshot().Travels(), got.Snapshot().Travels()
	if b.Name != name || b.ID == a.ID {
		t.Errorf("it is %s, called %q", b.ID, b.Name)
	}
	a.ID, a.Name, b.ID, b.Name = "", "", "", ""
	if !reflect.DeepEqual(a, b) {
		t.Errorf("the record is %+v, was %+v", b, a)
	}
	if _, err := s.Disks(t.Context(), got, snapshottest.NewGuest(t).Disks, t.TempDir(), 0); err != nil {
		t.Error(err)
	}
}

// TestDocumentedClients: a snapshot of ours passes through the documented clients in every direction, with its record.
func TestDocumentedClients(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	from := snapshots(t)
	snapshottest.Save(t, from, snapshottest.NewGuest(t), "dev")
	source := hold(t, from, "dev")
	auth := snapshot.Auth{Token: allToken}
	var export bytes.Buffer
	if err := from.Export(t.Context(), source, &export); err != nil {
		t.Fatal(err)
	}
	docPush(r, "theirs", export.Bytes(), false)
	docPush(r, "split", export.Bytes(), true)
	whole := chunked.New(chunked.Config{Whole: true}, from)
	if _, err := whole.Push(t.Context(), source, r.url+"/ours:1", auth, nil); err != nil {
		t.Fatal(err)
	}
	docPush(r, "again", docPull(r, "ours", "1", "passing"), false)

	for _, repo := range []string{"theirs", "split", "ours", "again"} {
		to := snapshots(t)
		client := chunked.New(chunked.Config{Hypervisors: []string{"fake"}}, to)
		if _, err := client.Pull(t.Context(), r.url+"/"+repo+":1", "pulled", auth, nil); err != nil {
			t.Fatalf("%s: %v", repo, err)
		}
		clonable(t, to, "pulled", source)

		streams := map[string][]byte{"downloaded": r.want(r.do("GET", "/dl/"+repo+"?tag=1", nil), 200).body}
		if repo != "split" {
			streams["streamed"] = docPull(r, repo, "1", "x")
		}
		for name, data := range streams {
			if _, err := to.Import(t.Context(), name, "", bytes.NewReader(data), nil); err != nil {
				t.Fatalf("%s %s: %v", repo, name, err)
			}
			clonable(t, to, name, source)
		}
	}
}

// TestChunksHaveATypeOfTheirOwn: the documented clients refuse our chunks by their type and do not misread them.
func TestChunksHaveATypeOfTheirOwn(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	from := snapshots(t)
	snapshottest.Save(t, from, snapshottest.NewGuest(t), "dev")
	if _, err := chunked.New(chunked.Config{}, from).Push(t.Context(), hold(t, from, "dev"), r.url+"/ours:1", snapshot.Auth{Token: allToken}, nil); err != nil {
		t.Fatal(err)
	}
	var m v1.Manifest
	if err := json.Unmarshal(r.want(r.do("GET", "/v2/ours/manifests/1", nil), 200).body, &m); err != nil {
		t.Fatal(err)
	}
	for _, taken := range []string{docArtifact, docArtifactV2, docConfigType} {
		if m.ArtifactType == taken || m.Config.MediaType == taken {
			t.Errorf("%s with a config of %s", m.ArtifactType, m.Config.MediaType)
		}
	}
	r.want(r.do("GET", "/dl/ours?tag=1", nil), 200)
}

// TestSnapshotsOfAnotherHypervisor: /dl/ serves a snapshot that has no record of ours as it is; a pull and an import
// refuse it in one sentence.
func TestSnapshotsOfAnotherHypervisor(t *testing.T) {
	var export bytes.Buffer
	w := tar.NewWriter(&export)
	sparse := map[string]string{docSparseMap: `[{"o":4096,"l":4},{"o":16384,"l":4}]`, docSparseSize: "1048576"}
	for _, e := range []struct {
		name, data string
		pax        map[string]string
	}{
		{"snapshot.json", `{"version":1,"config":{"id":"s1","name":"golden","image":"ubuntu","hypervisor":"cloud-hypervisor","cpu":2,"memory":1048576}}`, nil},
		{"cidata.img", "seed", nil},
		{"config.json", `{"cpus":{"boot_vcpus":2},"memory":{"size":1048576},"payload":{"kernel":"/x"}}`, nil},
		{"memory-ranges", "pagefour", sparse},
		{"overlay.qcow2", "QFI", nil},
		{"state.json", `{"id":"vm"}`, nil},
	} {
		err := w.WriteHeader(&tar.Header{Name: e.name, Size: int64(len(e.data)), Mode: 0o640, PAXRecords: e.pax})
		if _, err2 := io.WriteString(w, e.data); errors.Join(err, err2) != nil {
			t.Fatal(errors.Join(err, err2))
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, registry.Config{}, content.Config{})
	to := snapshots(t)
	for repo, split := range map[string]bool{"whole": false, "split": true} {
		docPush(r, repo, export.Bytes(), split)
		got := r.want(r.do("GET", "/dl/"+repo+"?tag=1", nil), 200).body
		want, served := entries(t, export.Bytes()), entries(t, got)
		delete(want, "snapshot.json")
		if !strings.Contains(served["snapshot.json"], `"hypervisor":"cloud-hypervisor"`) {
			t.Errorf("it begins with %s", served["snapshot.json"])
		}
		delete(served, "snapshot.json")
		if !reflect.DeepEqual(want, served) {
			t.Errorf("%s: %q instead of %q", repo, served, want)
		}
		_, err1 := to.Import(t.Context(), "x", "", bytes.NewReader(got), nil)
		_, err2 := to.Import(t.Context(), "x", "", bytes.NewReader(export.Bytes()), nil)
		_, err3 := chunked.New(chunked.Config{Hypervisors: []string{"qemu"}}, to).Pull(t.Context(), r.url+"/"+repo+":1", "x", snapshot.Auth{Token: allToken}, nil)
		for _, err := range []error{err1, err2, err3} {
			if !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), `another system made, of a guest of the hypervisor "cloud-hypervisor"`) {
				t.Errorf("%s: %v", repo, err)
			}
		}
	}
}

// entries returns the data and the sparse maps of a stream's entries by name.
func entries(t *testing.T, stream []byte) map[string]string {
	t.Helper()
	out := map[string]string{}
	in := tar.NewReader(bytes.NewReader(stream))
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		out[h.Name] = h.PAXRecords[docSparseMap] + h.PAXRecords[docSparseSize] + string(data)
	}
}

// TestEarlierReleases: what earlier releases pushed and exported is pulled, downloaded and imported.
func TestEarlierReleases(t *testing.T) {
	r := newRig(t, registry.Config{}, content.Config{})
	from := snapshots(t)
	snapshottest.Save(t, from, snapshottest.NewGuest(t), "dev")
	source := hold(t, from, "dev")
	auth := snapshot.Auth{Token: allToken}
	if _, err := chunked.New(chunked.Config{}, from).Push(t.Context(), source, r.url+"/ours:1", auth, nil); err != nil {
		t.Fatal(err)
	}
	// Their configuration had the type of the documented one, a number as version and the driver as hypervisor.
	var m v1.Manifest
	if err := json.Unmarshal(r.want(r.do("GET", "/v2/ours/manifests/1", nil), 200).body, &m); err != nil {
		t.Fatal(err)
	}
	var config map[string]json.RawMessage
	if err := json.Unmarshal(r.want(r.do("GET", "/v2/ours/blobs/"+m.Config.Digest.String(), nil), 200).body, &config); err != nil {
		t.Fatal(err)
	}
	config["schemaVersion"], config["hypervisor"] = json.RawMessage("1"), config["driver"]
	delete(config, "driver")
	data, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	m.ArtifactType, m.Config = docArtifactV2, r.pushBlob("ours", data)
	m.Config.MediaType = docConfigType
	r.pushManifest("ours", "earlier", m)

	// Their streams had the record in the first entry, and its sum with the others.
	var export, earlier bytes.Buffer
	if err := from.Export(t.Context(), source, &export); err != nil {
		t.Fatal(err)
	}
	record := entries(t, export.Bytes())["config.json"]
	in, w := tar.NewReader(&export), tar.NewWriter(&earlier)
	sums := ""
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		data, err2 := io.ReadAll(in)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		switch h.Name {
		case "config.json":
			continue
		case "snapshot.json":
			head := map[string]json.RawMessage{}
			if err := json.Unmarshal(data, &head); err != nil {
				t.Fatal(err)
			}
			head["snapshot"] = json.RawMessage(record)
			head["config"] = bytes.Replace(head["config"], []byte(`"hypervisor":"cloud-hypervisor","driver":"fake"`), []byte(`"hypervisor":"fake"`), 1)
			if data, err = json.Marshal(head); err != nil {
				t.Fatal(err)
			}
			sums = digest.FromBytes(data).Encoded() + "  snapshot.json\n"
		case "SHA256SUMS":
			_, rest, _ := strings.Cut(string(data), "\n") // without the record
			data = []byte(sums + rest)
		}
		h.Size = int64(len(data))
		err = w.WriteHeader(h)
		if _, err2 := w.Write(data); errors.Join(err, err2) != nil {
			t.Fatal(errors.Join(err, err2))
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}

	to := snapshots(t)
	if _, err := chunked.New(chunked.Config{Hypervisors: []string{"fake"}}, to).Pull(t.Context(), r.url+"/ours:earlier", "pulled", auth, nil); err != nil {
		t.Fatal(err)
	}
	clonable(t, to, "pulled", source)
	for name, stream := range map[string][]byte{"downloaded": r.want(r.do("GET", "/dl/ours?tag=earlier", nil), 200).body, "imported": earlier.Bytes()} {
		if _, err := to.Import(t.Context(), name, "", bytes.NewReader(stream), nil); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		clonable(t, to, name, source)
	}
}
