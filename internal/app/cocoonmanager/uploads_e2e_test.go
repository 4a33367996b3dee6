//go:build e2e

package cocoonmanager_test

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/storage/volume"
	uploadv1beta1 "kubevirt.io/containerized-data-importer-api/pkg/apis/upload/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/upload"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// uploads uploads a disk to a manager that is killed after each of its writes. The client repeats what was cut off, as virtctl does. In the end the claim
// names what the registry has, and when it has its volume, nothing is left of it there. The test makes the volume in place of a node.
func (r *rig) uploads(t *testing.T, ns string, k *killer) {
	t.Helper()
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: uploaded}
provisioner: %[2]s
volumeBindingMode: WaitForFirstConsumer
---
apiVersion: storage.k8s.io/v1
kind: CSIStorageCapacity
metadata: {name: room-for-uploads, namespace: kube-system}
storageClassName: uploaded
capacity: 10Gi
nodeTopology: {matchLabels: {kubernetes.io/hostname: one}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: up, namespace: %[1]s, annotations: {cdi.kubevirt.io/storage.upload.target: "", cdi.kubevirt.io/storage.bind.immediate.requested: ""}}
spec: {accessModes: [ReadWriteOnce], storageClassName: uploaded, volumeMode: Block, resources: {requests: {storage: 1Mi}}}
`, ns, contract.VolumeDriver), "create", "-f", "-")
	r.Kubectl(t, "", "label", "node", "one", corev1.LabelHostname+"=one", "--overwrite")
	claim := &corev1.PersistentVolumeClaim{}
	state := func() string {
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: "up"}, claim); err != nil {
			return err.Error()
		}
		a := claim.Annotations
		return fmt.Sprint(a[upload.AnnReady], " ", a[upload.AnnPhase], " ", a[contract.KeyVolumeUpload] != "", " ", a[volume.AnnSelectedNode])
	}
	kubetest.Eventually(t, "the claim", state, "true Running false ")

	front, err := tls.LoadX509KeyPair(filepath.Join(r.Dir, "pki", "front-proxy-client.crt"), filepath.Join(r.Dir, "pki", "front-proxy-client.key"))
	if err != nil {
		t.Fatal(err)
	}
	manager := "https://" + k.manager.args[slices.Index(k.manager.args, "--kubevirt-addr")+1]
	// send returns the status of the answer, 0 if there is none.
	send := func(path string, body []byte, header http.Header) (code int, text []byte) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, manager+path, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = header
		transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{front}}, DisableKeepAlives: true}
		resp, err := transport.RoundTrip(req)
		if err != nil {
			return 0, nil
		}
		defer resp.Body.Close()
		text, err = io.ReadAll(resp.Body)
		if err != nil {
			return 0, nil
		}
		return resp.StatusCode, text
	}
	var token uploadv1beta1.UploadTokenRequest
	kubetest.Eventually(t, "the token", func() string {
		code, text := send("/apis/upload.cdi.kubevirt.io/v1beta1/namespaces/"+ns+"/uploadtokenrequests", []byte(`{"spec":{"pvcName":"up"}}`),
			http.Header{"X-Remote-User": {"admin"}, "X-Remote-Group": {"system:masters"}})
		if code != http.StatusCreated {
			return fmt.Sprint(code, " ", string(text))
		}
		return fmt.Sprint(json.Unmarshal(text, &token))
	}, "<nil>")
	disk := make([]byte, 1<<20)
	disk[510], disk[511] = 0x55, 0xaa
	kubetest.Eventually(t, "the upload", func() string {
		code, text := send("/v1beta1/upload-async", disk, http.Header{"Authorization": {"Bearer " + token.Status.Token}})
		if code == http.StatusOK || code == http.StatusConflict && strings.Contains(string(text), "was uploaded") { // the answer was lost
			return "done"
		}
		return fmt.Sprint(code, " ", string(text))
	}, "done")
	kubetest.Eventually(t, "the claim with its disk", state, "false Succeeded true one")
	repo, tag := contract.UploadRepository(ns, string(claim.UID)), strings.Replace(claim.Annotations[contract.KeyVolumeUpload], ":", "-", 1)
	if code := r.tag(t, repo, tag); code != http.StatusOK {
		t.Errorf("the registry answers %d for what was uploaded", code)
	}
	if code, text := send("/v1beta1/upload", disk, http.Header{"Authorization": {"Bearer " + token.Status.Token}}); code != http.StatusConflict && code != 0 {
		t.Errorf("another upload: %d %s", code, text)
	}
	r.Kubectl(t, fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: up}
spec:
  capacity: {storage: 1Mi}
  accessModes: [ReadWriteOnce]
  volumeMode: Block
  storageClassName: uploaded
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: %[1]s, name: up, uid: %[2]s}
  csi: {driver: %[3]s, volumeHandle: x}
`, ns, claim.UID, contract.VolumeDriver), "create", "-f", "-")
	kubetest.Eventually(t, "what is left in the registry and the journal", func() string {
		journal := &corev1.ConfigMap{}
		if err := r.api.Get(t.Context(), client.ObjectKey{Namespace: kubetest.Namespace, Name: "cocoon-uploads"}, journal); err != nil {
			return err.Error()
		}
		return fmt.Sprint(r.tag(t, repo, tag), " ", len(journal.Data))
	}, "404 0")
	r.Kubectl(t, "", "delete", "pvc/up", "-n", ns, "--timeout=60s")
	r.Kubectl(t, "", "delete", "-n", "kube-system", "csistoragecapacity/room-for-uploads", "storageclass/uploaded", "pv/up")
}
