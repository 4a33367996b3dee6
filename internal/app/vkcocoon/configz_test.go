package vkcocoon

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	kubeletconfig "k8s.io/kubelet/config/v1beta1"
)

func TestConfigz(t *testing.T) {
	c, err := Config{
		NodeName: "n1", KubeletPort: 11250, Pods: 7, MetricsAddr: ":9091", EpochURL: "http://epoch:8080", EpochToken: "hush",
	}.complete()
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	c.configz().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/configz", nil))
	var got struct {
		Kubelet kubeletconfig.KubeletConfiguration `json:"kubeletconfig"`
		Own     map[string]any                     `json:"vkcocoon"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if k := got.Kubelet; k.Kind != "KubeletConfiguration" || k.Port != 11250 || k.MaxPods != 7 || *k.Authentication.Anonymous.Enabled || got.Own["nodeName"] != "n1" {
		t.Errorf("%s", w.Body)
	}
	if strings.Contains(w.Body.String(), "hush") {
		t.Errorf("a secret is told: %s", w.Body)
	}
}
